"""Offline batch processing of LLM prompts: a persistent queue, continuous batching, answers in SQL.

The names below are the public ones. They are loaded when they are first used, so that importing this package, or
asking the command line for help, costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchjobs.aio import AsyncBatch, AsyncClient
    from batchjobs.client import Batch, Client
    from batchjobs.errors import (
        BatchjobsError,
        ConnectionFailed,
        InvalidInput,
        InvalidParameter,
        KeyConflict,
        LineError,
        NotFound,
        UsageError,
        WaitTimeout,
    )
    from batchjobs.results import Choice, Result
    from batchjobs.settings import Settings, load_settings
    from batchjobs.types import (
        BatchInfo,
        BatchStatus,
        Command,
        Completion,
        Counts,
        Endpoint,
        FinishReason,
        Inflight,
        Pause,
        Priority,
        Request,
        RequestError,
        RequestStatus,
        SamplingParams,
        TokenCounts,
        VersionSpan,
    )

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "Batch",
    "BatchInfo",
    "BatchStatus",
    "BatchjobsError",
    "Choice",
    "Client",
    "Command",
    "Completion",
    "ConnectionFailed",
    "Counts",
    "Endpoint",
    "FinishReason",
    "Inflight",
    "InvalidInput",
    "InvalidParameter",
    "KeyConflict",
    "LineError",
    "NotFound",
    "Pause",
    "Priority",
    "Request",
    "RequestError",
    "RequestStatus",
    "Result",
    "SamplingParams",
    "Settings",
    "TokenCounts",
    "UsageError",
    "VersionSpan",
    "WaitTimeout",
    "__version__",
    "load_settings",
]

_HOMES = {
    "aio": ("AsyncBatch", "AsyncClient"),
    "client": ("Batch", "Client"),
    "errors": (
        "BatchjobsError",
        "ConnectionFailed",
        "InvalidInput",
        "InvalidParameter",
        "KeyConflict",
        "LineError",
        "NotFound",
        "UsageError",
        "WaitTimeout",
    ),
    "results": ("Choice", "Result"),
    "settings": ("Settings", "load_settings"),
    "types": (
        "BatchInfo",
        "BatchStatus",
        "Command",
        "Completion",
        "Counts",
        "Endpoint",
        "FinishReason",
        "Inflight",
        "Pause",
        "Priority",
        "Request",
        "RequestError",
        "RequestStatus",
        "SamplingParams",
        "TokenCounts",
        "VersionSpan",
    ),
}
_HOME_OF = {name: f"batchjobs.{module}" for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
