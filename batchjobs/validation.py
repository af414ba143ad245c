"""A dry run of a submission: what the lines ask for, and which of them would be refused. Nothing is stored.

The lines take the way of :mod:`batchjobs.submission`; only the sink is another one. What it has to remember of each
request, its id and a digest of its content, lies in a temporary database on disk that vanishes with it: so memory stays
flat, and a second use of an id is found as surely as by the real one.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from batchjobs.errors import BatchjobsError, InvalidInput, LineError
from batchjobs.sampling_fields import Defaults, Dialect
from batchjobs.store import DuplicateCustomId
from batchjobs.submission import Loader, Plan
from batchjobs.types import Endpoint, Request

if TYPE_CHECKING:
    from batchjobs.inputs import Input
    from batchjobs.submission import Progress

_LABELS = frozenset({"metadata", "model"})
"""What of a body has no part in the answer."""
_CACHE_KIB = 16 * 1024

Listener: TypeAlias = Callable[[Sequence[Request]], None]
"""Called with each chunk of accepted requests, in input order."""


@dataclass(slots=True)
class Asked:
    """What the accepted requests ask for.

    ``max_tokens`` is the sum of what their answers may be long, every choice counted, whatever a model's context says.
    ``formatted`` counts those with a ``response_format`` that is not plain text, ``seeded`` those that name a seed or
    get one by default.
    """

    requests: int = 0
    chats: int = 0
    choices: int = 0
    max_tokens: int = 0
    formatted: int = 0
    echoing: int = 0
    seeded: int = 0
    models: Counter[str] = field(default_factory=Counter)
    model_versions: Counter[str] = field(default_factory=Counter)

    @property
    def completions(self) -> int:
        return self.requests - self.chats

    def add(self, request: Request) -> None:
        body = request.body
        choices = request.n
        self.requests += 1
        self.chats += request.endpoint is Endpoint.CHAT
        self.choices += choices
        self.max_tokens += choices * body["max_tokens"]
        self.seeded += "seed" in body
        self.echoing += bool(body.get("echo"))
        if "response_format" in body:
            self.formatted += body["response_format"]["type"] != "text"
        if "model" in body:
            self.models[body["model"]] += 1
        if "model_version" in body:
            self.model_versions[body["model_version"]] += 1


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Prompts that come more than once with the same sampling: ``prompts`` of them, in ``requests`` altogether, so that
    ``repeated`` requests ask again what another one asked before."""

    prompts: int
    requests: int

    @property
    def repeated(self) -> int:
        return self.requests - self.prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a dry run found.

    ``lines`` counts those that are not blank, ``other_models`` names in lines that were refused for them. ``refusal``
    is the error that a submission would end with, if so.
    """

    lines: int
    asked: Asked
    duplicates: Duplicates
    loader: Loader
    other_models: Counter[str]
    refusal: InvalidInput | None = None

    @property
    def errors(self) -> Sequence[LineError]:
        return () if self.refusal is None else self.refusal.errors


def inspect(
    inputs: Sequence[Input],
    plan: Plan,
    progress: Progress = lambda count: None,
    listeners: Callable[[Loader], Sequence[Listener]] = lambda loader: (),
) -> Inspection:
    """Reads an input as a submission would, to its end, and closes it. ``listeners`` makes those who want to see the
    accepted requests, for a loader that can tell where each of them stands.

    Raises:
        UsageError: There are no requests, or a file cannot be read.
    """
    refusal = None
    with closing(_Seen()) as seen:
        sink = _Looking(seen)
        loader = Loader(sink, _as_given(plan), progress)
        sink.listeners = listeners(loader)
        try:
            loader.load(inputs)
        except InvalidInput as error:
            refusal = error
        finally:
            for source in inputs:
                source.close()
        return Inspection(
            lines=loader.requests,
            asked=sink.asked,
            duplicates=seen.duplicates(),
            loader=loader,
            other_models=loader.other_models,
            refusal=refusal,
        )


class _Looking:
    """The sink of a dry run."""

    def __init__(self, seen: _Seen) -> None:
        self.asked = Asked()
        self.listeners: Sequence[Listener] = ()
        self._seen = seen

    def add(self, requests: Sequence[Request], rejected: Mapping[int, LineError]) -> None:
        if pairs := self._seen.twice(requests):
            raise DuplicateCustomId(pairs)
        self._seen.add(requests)
        for request in requests:
            self.asked.add(request)
        for listener in self.listeners:
            listener(requests)


class _Seen:
    """Ids and digests of all requests so far, in a temporary database of its own on disk."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE ids (custom_id TEXT PRIMARY KEY, place INTEGER) WITHOUT ROWID")
        self._database.execute("CREATE TABLE prompts (digest INTEGER PRIMARY KEY, requests INTEGER)")

    def twice(self, requests: Sequence[Request]) -> list[tuple[str, int, int]]:
        """Notes the ids. Those that another request has used: (custom_id, index, index of the first)."""
        pairs = [(request.custom_id, request.index) for request in requests]
        before = self._database.total_changes
        self._within("INSERT OR IGNORE INTO ids VALUES (?, ?)", pairs)
        if self._database.total_changes - before == len(pairs):
            return []
        query = "SELECT place FROM ids WHERE custom_id = ?"
        first = [self._database.execute(query, (custom_id,)).fetchone()[0] for custom_id, _ in pairs]
        return [(*pair, place) for pair, place in zip(pairs, first, strict=True) if place != pair[1]]

    def add(self, requests: Sequence[Request]) -> None:
        digests = sorted((_digest(request.body),) for request in requests)  # in the order of the table: fewer pages
        self._within("INSERT INTO prompts VALUES (?, 1) ON CONFLICT DO UPDATE SET requests = requests + 1", digests)

    def duplicates(self) -> Duplicates:
        query = "SELECT count(*), coalesce(sum(requests), 0) FROM prompts WHERE requests > 1"
        prompts, requests = self._database.execute(query).fetchone()
        return Duplicates(prompts, requests)

    def close(self) -> None:
        self._database.close()

    def _within(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        try:
            self._database.execute("BEGIN")
            self._database.executemany(statement, rows)
            self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise BatchjobsError(
                f"the temporary file for ids cannot be written ({error}); free some space, or set TMPDIR to a folder "
                "on another disk"
            ) from error


def _digest(body: Mapping[str, Any]) -> int:
    """64 bits of prompt and sampling."""
    asked = {name: value for name, value in body.items() if name not in _LABELS}
    return int.from_bytes(blake2b(orjson.dumps(asked), digest_size=8).digest(), signed=True)


def _as_given(plan: Plan) -> Plan:
    given = plan.defaults
    return replace(plan, skip_invalid=False, defaults=_AsGiven(given.fields, given.system, given.model_version))


class _AsGiven(Defaults):
    """Defaults that draw no seed, so that equal lines are equal requests."""

    def sampling(self, given: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
        names_seed = "seed" in given or "seed" in self.fields
        fields = super().sampling(given, dialect)
        if not names_seed:
            fields.pop("seed", None)
        return fields
