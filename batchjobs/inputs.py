"""Where input lines come from: files, standard input, file objects, Python objects. One or several make one batch."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias, cast

import orjson

from batchjobs.errors import InvalidInput, LineError, UsageError
from batchjobs.foreign_files import recognised_format
from batchjobs.jsonl import open_input, read_lines_of

if TYPE_CHECKING:
    from batchjobs.sampling_fields import Defaults

Submittable: TypeAlias = str | os.PathLike[str] | BinaryIO | io.TextIOBase | Iterable[Mapping[str, Any]]
"""What a batch can be made from: a path, an open file, or dicts with the fields of an input line."""

_BLOCK_BYTES = 2**20


class Input(Protocol):
    """Lines with a name for messages; ``name`` is None where it would tell nobody anything."""

    @property
    def name(self) -> str | None: ...

    def lines(self) -> Iterator[tuple[int, bytes]]: ...

    def rereadable(self) -> RereadableInput: ...

    def close(self) -> None: ...


class RereadableInput(Input, Protocol):
    """An input whose bytes can be hashed before its lines are read."""

    def digest(self) -> bytes: ...


@dataclass(slots=True)
class FileInput:
    """A regular file. What was hashed is what is read: a file that changes in between is refused."""

    path: str | os.PathLike[str]
    _hashed: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        return os.fspath(self.path)

    def rereadable(self) -> RereadableInput:
        return self

    def digest(self) -> bytes:
        with open_input(self.path) as stream:
            digest = _digest(stream)
            self._hashed = _identity(stream)
        return digest

    def lines(self) -> Iterator[tuple[int, bytes]]:
        with open_input(self.path) as stream:
            yield from read_lines_of(stream, self.name)
            if self._hashed not in (None, _identity(stream)):
                raise UsageError(f"{self.name} changed while it was read; submit it again when it is complete")

    def close(self) -> None:
        """Nothing is open between readings."""


@dataclass(slots=True)
class StreamInput:
    """A pipe or an open file: read once, from where it stands, and left open unless it is ``owned``."""

    stream: BinaryIO
    name: str | None
    owned: bool = False

    def lines(self) -> Iterator[tuple[int, bytes]]:
        return read_lines_of(self.stream, self.name or "the input")

    def rereadable(self) -> RereadableInput:
        return _spooled(iter(lambda: self.stream.read(_BLOCK_BYTES), b""), self.name)

    def close(self) -> None:
        if self.owned:
            self.stream.close()


@dataclass(slots=True)
class ObjectInput:
    """Dicts as Python has them. They take the way of lines, so that the same checks hold."""

    objects: Iterable[Mapping[str, Any]]
    name: str | None = None

    def lines(self) -> Iterator[tuple[int, bytes]]:
        for number, item in enumerate(self.objects, 1):
            yield number, _as_line(item, number)

    def rereadable(self) -> RereadableInput:
        return _spooled((line + b"\n" for _, line in self.lines()), self.name)

    def close(self) -> None:
        """The objects are the caller's."""


@dataclass(slots=True)
class SpooledInput:
    """A stream's bytes in a temporary file, which vanishes when it is closed."""

    file: BinaryIO
    name: str | None
    hashed: bytes

    def rereadable(self) -> RereadableInput:
        return self

    def digest(self) -> bytes:
        return self.hashed

    def lines(self) -> Iterator[tuple[int, bytes]]:
        self.file.seek(0)
        return read_lines_of(self.file, self.name or "the input")

    def close(self) -> None:
        self.file.close()


def open_source(source: Submittable) -> Input:
    """The input behind what a caller gave. Raises UsageError when it is none."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            raise UsageError(f"{path} is a folder; name a file")
        if path.exists() and not path.is_file():  # a pipe, as from a shell's <(...)
            return StreamInput(open_input(path), str(path), owned=True)
        return FileInput(source)
    if isinstance(source, io.TextIOBase):
        return StreamInput(getattr(source, "buffer", None) or io.BytesIO(source.read().encode()), _name_of(source))
    if hasattr(source, "read"):
        return StreamInput(cast("BinaryIO", source), _name_of(source))
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise UsageError(f"a path, an open file or an iterable of dicts is wanted, not {type(source).__name__}")
    return ObjectInput(source)


def fingerprint(inputs: Sequence[RereadableInput], model: str | None, defaults: Defaults) -> str:
    """What makes two submissions the same: the bytes of the input, the model and the defaults."""
    settings = orjson.dumps([model, defaults.as_json()], option=orjson.OPT_SORT_KEYS)
    total = hashlib.sha256(hashlib.sha256(settings).digest())
    for source in inputs:
        total.update(source.digest())
    return total.hexdigest()


def numbered_lines(inputs: Sequence[Input]) -> Iterator[tuple[Input, int, bytes]]:
    """Every line of every input, in order. Raises InvalidInput for a file that is no JSON Lines at all."""
    for source in inputs:
        lines = source.lines()
        head = list(islice(lines, 2))
        complaint = recognised_format([raw for _, raw in head])
        if complaint is not None:
            name = source.name or "the input"
            raise InvalidInput(name, [LineError(head[0][0], complaint, code="not_json_lines")])
        for line_no, raw in chain(head, lines):
            yield source, line_no, raw


def _name_of(stream: object) -> str | None:
    name = getattr(stream, "name", None)
    return name if isinstance(name, str) else None


def _digest(stream: BinaryIO) -> bytes:
    return hashlib.file_digest(cast("io.BufferedReader", stream), "sha256").digest()


def _identity(stream: BinaryIO) -> tuple[int, int, int]:
    found = os.fstat(stream.fileno())
    return found.st_ino, found.st_size, found.st_mtime_ns


def _spooled(chunks: Iterator[bytes], name: str | None) -> SpooledInput:
    file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - open as long as the input is used
    digest = hashlib.sha256()
    try:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
    except BaseException:
        file.close()
        raise
    return SpooledInput(file, name, digest.digest())


def _as_line(item: object, number: int) -> bytes:
    # Written as ASCII with every odd number and character kept, for the strict reader to refuse by name.
    try:
        return json.dumps(dict(item) if isinstance(item, Mapping) else item, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"item {number} cannot be written as JSON: {error}") from None
