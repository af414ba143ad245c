"""Continuous batching over a paged KV cache, for any causal language model that transformers runs.

Knows no Redis and no SQL. The public names are loaded on first use, so that importing the package is free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchjobs.types import SamplingParams
    from workers.engine.config import EngineConfig
    from workers.engine.engine import Engine
    from workers.engine.loop import EngineFull, EngineLoop, EngineStopped
    from workers.engine.observer import EngineObserver
    from workers.engine.outbox import StreamPiece
    from workers.engine.requests import EngineDelta, EngineOutput, EngineRequest, EngineStats, PromptError
    from workers.engine.update import StagedModel, UpdateRefused, UpdateReport

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineDelta",
    "EngineFull",
    "EngineLoop",
    "EngineObserver",
    "EngineOutput",
    "EngineRequest",
    "EngineStats",
    "EngineStopped",
    "PromptError",
    "SamplingParams",
    "StagedModel",
    "StreamPiece",
    "UpdateRefused",
    "UpdateReport",
]

_HOMES = {
    "Engine": "workers.engine.engine",
    "EngineConfig": "workers.engine.config",
    "EngineLoop": "workers.engine.loop",
    "EngineFull": "workers.engine.loop",
    "EngineStopped": "workers.engine.loop",
    "EngineObserver": "workers.engine.observer",
    "EngineDelta": "workers.engine.requests",
    "StreamPiece": "workers.engine.outbox",
    "EngineOutput": "workers.engine.requests",
    "EngineRequest": "workers.engine.requests",
    "EngineStats": "workers.engine.requests",
    "PromptError": "workers.engine.requests",
    "SamplingParams": "batchjobs.types",
    "StagedModel": "workers.engine.update",
    "UpdateRefused": "workers.engine.update",
    "UpdateReport": "workers.engine.update",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
