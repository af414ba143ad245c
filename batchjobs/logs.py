"""What long-running commands log on stderr: one line an event, for people or as JSON for programs.

Kept true here, in both forms:
- No secret is written: neither the password of any URL, nor a password that this process was told, wherever it stands
  in a message or a traceback.
- No control character reaches a terminal: each is shown as an escape.

Lines come from :mod:`logging`, so those of libraries look the same; structlog lays them out.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import unquote

import orjson
from structlog.stdlib import ProcessorFormatter

from batchjobs.text import hide_password, visible
from batchjobs.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from structlog.typing import EventDict

    from batchjobs.settings import Settings

LogForm: TypeAlias = Literal["text", "json"]

IDS = ("batch", "shard", "request")
"""What a line may be about, from ``extra`` (or from a shard among the arguments): fields of their own in JSON."""

SECRET_VARIABLES = ("PGPASSWORD", "REDISCLI_AUTH", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_URL_VARIABLES = ("BATCHJOBS_REDIS_URL", "BATCHJOBS_DATABASE_URL")

SHORTEST_SECRET = 4
"""Shorter ones are hidden in URLs alone: their letters stand everywhere."""

_PASSWORD_IN_URL = re.compile(r"://[^:@/?#]*:(.+)@|[?&](?:password|passwd|pwd|sslpassword)=([^&#]+)", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_ASSIGNED = re.compile(
    r"""\b((?:ssl)?password|passwd|pwd|requirepass|masterauth)(\s*=\s*)('(?:[^'\\]|\\.)*'|"[^"]*"|[^\s&,;)'"]+)""",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\b(bearer |hf_)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)


class Redactor:
    """Writes ``***`` for secrets. ``urls`` are addresses whose passwords are among them."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        known = {os.environ.get(name, "") for name in SECRET_VARIABLES}
        for url in (*urls, *(os.environ.get(name, "") for name in _URL_VARIABLES)):
            known |= _passwords(url)
        # The longest first: one may be a part of another.
        kept = sorted((secret for secret in known if len(secret) >= SHORTEST_SECRET), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, kept))) if kept else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub("***", text)
        if "://" in text:
            text = _URL.sub(lambda url: hide_password(url.group()), text)
        return _TOKEN.sub(r"\1***", _ASSIGNED.sub(r"\1\2***", text))


def _passwords(url: str) -> set[str]:
    """The passwords in a URL, as they are written and as they are meant."""
    written = {match.group(match.lastindex or 0) for match in _PASSWORD_IN_URL.finditer(url)}
    return written | {unquote(password) for password in written}


class _Formatter(ProcessorFormatter):
    """Lays a record out by :meth:`line`. ``worker`` is who logs; ``urls`` as in :class:`Redactor`."""

    def __init__(self, *, worker: str | None = None, urls: Iterable[str] = ()) -> None:
        super().__init__(foreign_pre_chain=[_take_ids], processors=[self._render], pass_foreign_args=True)
        self.worker = worker
        self._hide = Redactor(urls)

    def line(self, record: logging.LogRecord, event: str, trace: str, ids: Mapping[str, Any]) -> str:
        """The record as one line, and ``trace`` (empty, or several lines) where it belongs."""
        raise NotImplementedError

    def _render(self, logger: object, method: str, fields: EventDict) -> str:
        record: logging.LogRecord = fields["_record"]
        ids = {name: fields[name] for name in IDS if name in fields}
        return self.line(record, self._clean(str(fields["event"])), self._trace(fields), ids)

    def _clean(self, text: str, *, keep_newlines: bool = False) -> str:
        return visible(self._hide(text), keep_newlines=keep_newlines)

    def _trace(self, fields: EventDict) -> str:
        """The traceback, and where the line was logged if that was asked for."""
        parts = []
        info = fields.get("exc_info")
        if isinstance(info, tuple) and info[0] is not None:
            parts.append(self.formatException(info))
        if stack := fields.get("stack_info"):
            parts.append(str(stack))
        return self._clean("\n".join(parts), keep_newlines=True)


class LineFormatter(_Formatter):
    """``2026-03-01T12:00:00Z INFO claimed shard …``. Only a traceback, which is a bug of ours, takes more lines."""

    def line(self, record: logging.LogRecord, event: str, trace: str, ids: Mapping[str, Any]) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f"{at} {record.levelname} {event}" + (f"\n{trace}" if trace else "")


class JsonFormatter(_Formatter):
    """One object a line: time, level, logger, event; and worker, batch, shard, request, exception where there are such.

    An id that is a number stays one; everything else is text.
    """

    def line(self, record: logging.LogRecord, event: str, trace: str, ids: Mapping[str, Any]) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
        }
        if self.worker is not None:
            fields["worker"] = self.worker
        for name, value in ids.items():
            fields[name] = value if isinstance(value, int) else self._clean(str(value))
        if trace:
            fields["exception"] = trace
        return orjson.dumps(fields).decode()


def _take_ids(logger: object, method: str, fields: EventDict) -> EventDict:
    """Ids that came with ``extra``; a shard among the arguments of the message gives its batch and its number."""
    record: logging.LogRecord = fields["_record"]
    for name in IDS:
        if (value := getattr(record, name, None)) is not None:
            fields[name] = value
    arguments = fields.get("positional_args")
    mentioned = arguments if isinstance(arguments, tuple) else ()
    shard = fields.get("shard", next((each for each in mentioned if isinstance(each, ShardId)), None))
    if isinstance(shard, ShardId):
        fields.setdefault("batch", shard.batch_id)
        fields["shard"] = shard.shard_no
    return fields


def log_to_stderr(
    form: LogForm = "text",
    *,
    worker: str | None = None,
    level: int = logging.INFO,
    settings: Settings | None = None,
) -> None:
    """What this program says, and warnings of its libraries. Called once, by the command line.

    Args:
        form: ``text`` for people, ``json`` for programs: one object a line.
        worker: Who logs, for JSON; :func:`name_worker` says it later.
        level: The least that is written of what this program itself says.
        settings: Where passwords stand; those of the environment are known anyway.
    """
    urls = [url for url in (settings.redis_url, settings.database_url) if url] if settings is not None else []
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if form == "json" else LineFormatter)(worker=worker, urls=urls))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("batchjobs", "workers"):
        logging.getLogger(name).setLevel(level)
    for name in ("rq.worker", "rq.job", "rq.queue", "rq.registry"):
        logging.getLogger(name).setLevel(logging.WARNING)


def name_worker(worker: str) -> None:
    """From now on JSON lines name this worker, whose name was not known when the log was set up."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Formatter):
            handler.formatter.worker = worker
