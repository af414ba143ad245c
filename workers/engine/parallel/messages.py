"""What the ranks of a model that is split over several devices tell each other, as frames on a socket between two
processes of one machine.

A frame is a head of two numbers, a JSON text, and the arrays that the text names by their place. Nothing is unpickled,
so a frame can make nothing but plain data and the few classes that are named here.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from workers.engine.attention.interface import PackedRows
from workers.engine.batch import PackedBatch
from workers.engine.offload import Direction, PageCopy

ALIGNMENT = 16
_HEAD = struct.Struct("!QQ")  # bytes of the text, bytes of the arrays
_ARRAY, _CLASS, _MEMBER = "#array", "#class", "#member"


@dataclass(frozen=True, slots=True)
class Begin:
    """A follower's place among the ranks. Its first message."""

    rank: int
    size: int
    device: str
    store: str  # path of the file by which the ranks find each other


@dataclass(frozen=True, slots=True)
class Here:
    """A follower's first word: it is about to join the others."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model to load a part of, instead of the one before. ``config`` has the fields of an EngineConfig."""

    model: str
    revision: str | None
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass, which every rank does its part of."""

    batch: PackedBatch
    copies: list[PageCopy]


@dataclass(frozen=True, slots=True)
class Failed:
    """A follower's last word. ``is_refusal``: the model or a setting cannot be used, which is nobody's fault here."""

    reason: str
    is_refusal: bool


Message = Begin | Here | Load | Forward | Failed

_CLASSES = {each.__name__: each for each in (Begin, Here, Load, Forward, Failed, PackedBatch, PackedRows, PageCopy)}
_ENUMS = {each.__name__: each for each in (Direction,)}


def send(connection: socket.socket, message: Message) -> None:
    """Raises OSError when the other end is gone."""
    arrays: list[np.ndarray] = []
    text = json.dumps(_plain(message, arrays)).encode()
    data = bytearray().join(_padded(array) for array in arrays)
    connection.sendall(b"".join((_HEAD.pack(len(text), len(data)), text, data)))


def receive(connection: socket.socket) -> Message | None:
    """The next message; None when the other end is gone. Its arrays have memory of their own."""
    if (head := _read(connection, _HEAD.size)) is None:
        return None
    text_size, data_size = _HEAD.unpack(head)
    if (body := _read(connection, text_size + data_size)) is None:
        return None
    message: Message = _made(json.loads(body[:text_size]), _Arrays(body, text_size))
    return message


def _read(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            count = connection.recv_into(view[at:])
        except ConnectionError:
            return None
        if not count:
            return None
        at += count
    return data


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {_ARRAY: value.dtype.str, "shape": value.shape}
    if isinstance(value, Enum):
        return {_MEMBER: value.name, "of": type(value).__name__}
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: _plain(getattr(value, field.name), arrays) for field in fields(value)}
        return {_CLASS: type(value).__name__, **own}
    if isinstance(value, list | tuple):
        return [_plain(each, arrays) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each, arrays) for name, each in value.items()}
    return int(value) if isinstance(value, np.integer) else value


def _made(value: Any, arrays: _Arrays) -> Any:
    """The inverse of :func:`_plain`; the arrays come in the order in which they were put away."""
    if isinstance(value, list):
        return [_made(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return arrays.next(np.dtype(value[_ARRAY]), tuple(value["shape"]))
    if _MEMBER in value:
        return _ENUMS[value["of"]][value[_MEMBER]]
    own = {name: _made(each, arrays) for name, each in value.items() if name != _CLASS}
    return _CLASSES[value[_CLASS]](**own) if _CLASS in value else own


def _padded(array: np.ndarray) -> bytes:
    return array.tobytes() + bytes(-array.nbytes % ALIGNMENT)


class _Arrays:
    """The arrays behind a frame's text, one after the other."""

    def __init__(self, body: bytearray, at: int) -> None:
        self._body, self._at = body, at

    def next(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(self._body, dtype, count, self._at).reshape(shape).copy()
        self._at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return array


def messages(connection: socket.socket) -> Iterator[Message]:
    """Until the other end is gone."""
    while (message := receive(connection)) is not None:
        yield message
