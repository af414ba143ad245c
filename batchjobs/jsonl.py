"""Input lines -> requests. Nothing is guessed and nothing dropped in silence: a line is understood whole or refused.

A line is either plain (``prompt`` or ``messages`` with sampling fields beside it) or in the form of the OpenAI Batch
API (``custom_id``, ``method``, ``url``, ``body``). ``docs/input.md`` describes both for users.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from batchjobs import strict_json
from batchjobs.chat import read_messages, read_template_kwargs
from batchjobs.errors import LineError, UsageError
from batchjobs.fields import (
    FieldError,
    is_shallow,
    joined,
    json_type,
    listed,
    text_value,
    unknown_name,
    version_value,
    wrong_type,
)
from batchjobs.foreign_lines import body_advice, line_advice
from batchjobs.openai_lines import OTHER_NAMES, UNSUPPORTED, open_envelope, refused
from batchjobs.sampling_fields import NO_DEFAULTS, SAMPLING_NAMES, Defaults, Dialect, token_id
from batchjobs.types import Endpoint, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_LINE_BYTES = 8 * 2**20
"""A longer line is refused by its number; the lines around it are read."""

MAX_CUSTOM_ID_CHARACTERS = 512
MAX_METADATA_DEPTH = 200
"""Objects and lists inside each other; a little more cannot be written as JSON again."""

_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_BODY_NAMES = SAMPLING_NAMES | OTHER_NAMES | {"prompt", "messages"}
_ACCEPTED = SAMPLING_NAMES | {"prompt", "messages", "model", "model_version", "metadata", "chat_template_kwargs"}


class InvalidLineError(ValueError):
    """One line was refused; ``error`` says which and why."""

    def __init__(self, error: LineError) -> None:
        self.error = error
        super().__init__(str(error))


# ------------------------------------------------------------------------------------------------- bytes -> lines


def open_input(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens an input file, or says in one sentence why it cannot be."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from None


def read_lines_of(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yields ``(line number, line)``, counted from 1, without blank lines and line ends. gzip is unpacked.

    Lines end at LF only. Of a line over ``MAX_LINE_BYTES`` one byte more than that is yielded, for ``parse_line`` to
    refuse, and the rest is skipped, so that memory stays flat. ``name`` stands in messages. Raises UsageError when the
    stream cannot be read.
    """
    try:
        plain = _unpacked(_buffered(stream), name)
        line_no = 0
        while raw := plain.readline(MAX_LINE_BYTES + 2):  # room for the line end
            line_no += 1
            whole = raw.endswith(b"\n")
            raw = raw.removesuffix(b"\n").removesuffix(b"\r")
            if line_no == 1:
                raw = raw.removeprefix(_BOM)
            if not whole:
                _skip_rest(plain)
            if raw and not raw.isspace():
                yield line_no, raw
    except EOFError:
        raise UsageError(f"{name} is damaged: its gzip data ends too early; make or fetch the file again") from None
    except (zlib.error, gzip.BadGzipFile):
        raise UsageError(f"{name} is damaged: its gzip data cannot be read; make or fetch the file again") from None
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from None


def _buffered(stream: BinaryIO) -> io.BufferedReader:
    if hasattr(stream, "peek"):
        return cast("io.BufferedReader", stream)
    return io.BufferedReader(cast("io.RawIOBase", stream))


def _unpacked(stream: io.BufferedReader, name: str) -> io.BufferedReader:
    if stream.peek(2)[:2] != _GZIP_MAGIC:
        return stream
    unpacked: io.BufferedReader = io.BufferedReader(gzip.GzipFile(fileobj=stream), 2**17)
    if unpacked.peek(2)[:2] == _GZIP_MAGIC:
        raise UsageError(f"{name} is gzip-compressed twice; unpack it once (gunzip) and submit the result")
    return unpacked


def _skip_rest(stream: io.BufferedReader) -> None:
    while (chunk := stream.readline(2**20)) and not chunk.endswith(b"\n"):
        pass


# ------------------------------------------------------------------------------------------------ line -> request


def parse_line(raw: bytes, line_no: int, index: int, defaults: Defaults = NO_DEFAULTS) -> Request:
    """The request that one line stands for; ``index`` is its place in the batch. Raises InvalidLineError."""
    line: Any = None
    try:
        if len(raw) > MAX_LINE_BYTES:
            raise FieldError(
                f"longer than {MAX_LINE_BYTES // 2**20} MiB, the most a line may have", None, "line_too_long"
            )
        line = strict_json.loads(raw)
        return _request(line, index, defaults)
    except FieldError as problem:
        given = line.get("custom_id") if type(line) is dict else None
        custom_id = given[:MAX_CUSTOM_ID_CHARACTERS] if type(given) is str else None
        raise InvalidLineError(LineError(line_no, problem.message, problem.field, custom_id, problem.code)) from None


def _request(line: Any, index: int, defaults: Defaults) -> Request:
    if type(line) is not dict:
        raise FieldError(f"each line must be a JSON object, not {json_type(line)}")
    if "body" in line or "url" in line or "method" in line:
        endpoint, fields = open_envelope(line)
        dialect = Dialect.CHAT if endpoint is Endpoint.CHAT else Dialect.COMPLETIONS
        custom_id = _custom_id(line["custom_id"])
        try:
            body = _body(fields, endpoint, dialect, defaults)
        except FieldError as problem:
            raise problem.below("body") from None
    else:
        fields = dict(line)
        given = fields.pop("custom_id", None)
        endpoint = _plain_endpoint(fields, given is not None)
        custom_id = f"request-{index}" if given is None else _custom_id(given)
        body = _body(fields, endpoint, Dialect.PLAIN, defaults)
    return Request(index=index, custom_id=custom_id, endpoint=endpoint, body=body)


def _custom_id(value: Any) -> str:
    if len(text_value("custom_id", value)) > MAX_CUSTOM_ID_CHARACTERS:
        raise FieldError(f"custom_id is longer than {MAX_CUSTOM_ID_CHARACTERS} characters", "custom_id")
    return str(value)


def _plain_endpoint(fields: dict[str, Any], has_id: bool) -> Endpoint:
    if "prompt" in fields:
        if "messages" in fields:
            raise FieldError("prompt and messages exclude each other; give one of them", "messages")
        return Endpoint.COMPLETIONS
    if "messages" in fields:
        return Endpoint.CHAT
    found = f" (the line has: {listed(fields, width=32)})" if fields else "" if has_id else " (the line is empty)"
    if has_id:
        message = f"missing method, url, body; or prompt or messages, for a plain line{found}"
    else:
        message = f"neither prompt or messages nor custom_id, method, url and body found{found}"
    advice = line_advice(fields)
    raise FieldError(f"{message}; {advice}" if advice else message)


def _body(fields: dict[str, Any], endpoint: Endpoint, dialect: Dialect, defaults: Defaults) -> dict[str, Any]:
    """What is stored: the prompt or the messages first, then the sampling fields, then the labels."""
    body: dict[str, Any]
    if endpoint is Endpoint.CHAT:
        if "messages" not in fields:
            raise _missing("messages", fields, endpoint)
        body = {"messages": read_messages(fields["messages"], defaults.system)}
    else:
        if "prompt" not in fields:
            raise _missing("prompt", fields, endpoint)
        body = {"prompt": _prompt(fields["prompt"])}
    given: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in SAMPLING_NAMES:
            if name not in body:
                others[name] = value
        elif value is not None:
            given[name] = value
    labels = _labels(others, endpoint, dialect) if others else {}
    if defaults.model_version is not None:
        labels.setdefault("model_version", defaults.model_version)
    body.update(defaults.sampling(given, dialect))
    if endpoint is Endpoint.CHAT and body.get("echo"):
        raise FieldError("echo repeats the prompt of a completion; a chat has none to repeat, so leave it out", "echo")
    body.update(labels)
    return body


def _missing(name: str, fields: dict[str, Any], endpoint: Endpoint) -> FieldError:
    advice = body_advice(fields, endpoint)
    return FieldError(f"{name} is missing; {advice}" if advice else f"{name} is missing", name)


def _prompt(value: Any) -> str | list[int]:
    if type(value) is str:
        return text_value("prompt", value)
    if type(value) is dict and "0" in value:  # a table written column by column
        advice = 'write one line for each (in pandas, to_json with orient="records", lines=True)'
        raise FieldError(f"prompt holds the prompts of many lines; {advice}", "prompt")
    if type(value) is not list:
        raise wrong_type("prompt", "a string or a list of token ids", value)
    if not value:
        raise FieldError("prompt must not be empty", "prompt")
    if type(value[0]) in (str, list):
        raise FieldError("prompt must be one prompt; write one line for each", "prompt")
    for place, item in enumerate(value):
        if type(item) is not int or not 0 <= item < 2**31:
            token_id(f"prompt[{place}]", item)  # says what is wrong
    return value


def _labels(others: dict[str, Any], endpoint: Endpoint, dialect: Dialect) -> dict[str, Any]:
    """``model`` and its version, ``metadata`` and the template's arguments; raises one error that names every other
    field."""
    accepted = _ACCEPTED | {"custom_id"} if dialect is Dialect.PLAIN else _ACCEPTED
    found = (_other_problem(name, value, endpoint, accepted) for name, value in others.items())
    problems = filter(None, found)
    if (first := next(problems, None)) is not None:
        raise joined(itertools.chain([first], problems))
    labels = {name: others[name] for name in ("model", "model_version", "metadata") if others.get(name) is not None}
    if others.get("chat_template_kwargs") is not None:
        labels["chat_template_kwargs"] = read_template_kwargs(others["chat_template_kwargs"])
    return labels


def _other_problem(name: str, value: Any, endpoint: Endpoint, accepted: frozenset[str]) -> FieldError | None:
    if name not in _BODY_NAMES and name not in UNSUPPORTED:
        return unknown_name(name, accepted)
    if value is None:
        return None
    if name in ("prompt", "messages"):
        return FieldError(f"{name} is not a field of {endpoint}", name)
    if name == "chat_template_kwargs":
        return None if endpoint is Endpoint.CHAT else FieldError(f"{name} is only for chats", name)
    if name == "model":
        return _problem_of(text_value, name, value)
    if name == "model_version":
        return _problem_of(version_value, name, value)
    if name == "metadata":
        return _problem_of(_metadata, name, value)
    reason = refused(name, value)
    return FieldError(f"{name} {reason}", name) if reason else None


def _problem_of(check: Callable[[str, Any], object], name: str, value: Any) -> FieldError | None:
    try:
        check(name, value)
    except FieldError as problem:
        return problem
    return None


def _metadata(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise wrong_type(name, "an object", value)
    if not is_shallow(value, MAX_METADATA_DEPTH):
        raise FieldError(f"{name} is nested more than {MAX_METADATA_DEPTH} deep", name)
