"""What the log says of commands: who wishes what, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchjobs.text import plural, shortened
from batchjobs.types import CommandKind, Inflight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchjobs.types import Command

_MAX_NAME = 200


def wish(command: Command) -> str:
    """The sentence for a command that begins."""
    given, by = command.arguments, shortened(command.given_by or "somebody", _MAX_NAME)
    if command.kind is CommandKind.DRAIN:
        return f"{by} drains this worker: what it holds is {'given back' if given.get('release') else 'finished'}"
    source = shortened(str(given.get("model")), _MAX_NAME)
    if given.get("revision"):
        source += f" at revision {shortened(str(given['revision']), _MAX_NAME)}"
    policy = shortened(str(given.get("inflight") or Inflight.RECOMPUTE), _MAX_NAME)
    doing = "tries whether the model could be updated" if given.get("dry_run") else "updates the model"
    return f"{by} {doing} to {source} (--inflight {policy})"


def report(command: Command, result: Mapping[str, Any]) -> str:
    """The sentence for one that was carried out."""
    if command.kind is CommandKind.DRAIN:
        finished = plural(result.get("finished", 0), "request")
        return f"drained: {finished} finished, {result.get('given_back', 0)} given back"
    return _tried(result) if result.get("dry_run") else _updated(result)


def _tried(result: Mapping[str, Any]) -> str:
    way = "by a full reload" if result.get("is_reload") else "without a reload"
    return f"the model can be updated {way}: {_exchange(result)}; nothing was changed"


def _updated(result: Mapping[str, Any]) -> str:
    counts = {word: result.get(word, 0) for word in ("finished", "restarted", "recomputed", "kept", "given_back")}
    requests = [f"{plural(count, 'request')} {word.replace('_', ' ')}" for word, count in counts.items() if count]
    still = f"no token was made for {result.get('paused_seconds', 0.0):.3f} s"
    return f"updated the model: {'; '.join([_exchange(result), still, *requests])}"


def _exchange(result: Mapping[str, Any]) -> str:
    old, new = (
        [shortened(str(result.get(f"{age}_{part}")), _MAX_NAME) for part in ("model", "version")]
        for age in ("old", "new")
    )
    return f"{' '.join(old)} -> {' '.join(new)}"
