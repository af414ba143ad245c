"""Fixtures for all tests; they are defined in `tests/support`."""

from __future__ import annotations

import os

# Tests run side by side, and on tiny models a second thread costs more than it brings. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests start hundreds of processes, each of which would compile the project's modules anew for want of their bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from tests.support.cases import pytest_addoption, pytest_collection_modifyitems, pytest_terminal_summary
from tests.support.llama import llama
from tests.support.machine import embedded, home
from tests.support.redis import redis_server, redis_url
from tests.support.sql import database_url, empty_database_url, migrated_sqlite_file, postgres_server, store

__all__ = [
    "database_url",
    "embedded",
    "empty_database_url",
    "home",
    "llama",
    "migrated_sqlite_file",
    "postgres_server",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_terminal_summary",
    "redis_server",
    "redis_url",
    "store",
]
