"""Output files: never half-written, never over something else by mistake."""

from __future__ import annotations

import contextlib
import filecmp
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BESIDE = ("-journal", "-wal", "-shm")
"""What SQLite keeps beside a database while it is open."""


def check_target(path: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Raises UsageError when ``path`` cannot or should not be written, before any work is done. With ``force``, it may
    exist."""
    refuse_inputs(path, inputs)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    folder = _real(path).parent
    if not folder.is_dir():
        raise UsageError(f"the folder {folder} does not exist; create it first")
    if is_replaced(path) and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError(f"the folder {folder} cannot be written; change its permissions or choose another one")
    if not force:
        refuse_existing(path)


def refuse_existing(path: Path) -> None:
    """Raises UsageError where a file would be replaced."""
    if path.is_file():
        raise UsageError(f"{path} exists already; --force replaces it")


def refuse_inputs(path: Path, inputs: Iterable[Path], what: str = "the input file") -> None:
    """Raises UsageError where ``path`` is one of the inputs, by whatever name or link: not even --force goes there."""
    for source in inputs:
        with contextlib.suppress(OSError):
            if path.samefile(source):
                raise UsageError(f"{path} is {what}; choose another name for the output")


def refuse_twice(target: Path | None, errors: Path) -> None:
    """Raises UsageError where failures would go where answers or messages go already."""
    if target is not None and _real(target) == _real(errors) and is_replaced(errors):
        raise UsageError("--errors and --output name the same file")
    for number, name in ((1, "standard output"), (2, "standard error")):
        with contextlib.suppress(OSError):
            if is_replaced(errors) and os.path.samestat(os.fstat(number), errors.stat()):
                raise UsageError(f"{errors} is where {name} goes; choose another name for the failures")


def is_replaced(path: Path) -> bool:
    """Whether a new file takes the place of ``path``. Pipes and devices are written directly."""
    return path.is_file() or not path.exists()


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def output(path: Path | None, *, keep_equal: bool = False) -> Iterator[BinaryIO]:
    """A stream that ends up whole in ``path`` (stdout when None), or not at all.

    It is written to a temporary file beside its target and renamed at the end; a link's target is replaced, not the
    link. Pipes and devices are written directly. With ``keep_equal``, a file with the same content stays untouched and
    one with other content is refused.
    """
    if path is None:
        with _standard_output() as stream:
            yield stream
    elif not is_replaced(path):
        with path.open("wb") as stream:
            yield stream
    else:
        with replacing(path, keep_equal=keep_equal) as part, part.open("wb", 2**20) as stream:
            yield stream


@contextlib.contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    try:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.filename is None:
            error.filename = "standard output"
        raise


@contextlib.contextmanager
def replacing(path: Path, *, keep_equal: bool = False) -> Iterator[Path]:
    """An empty temporary file, which takes the place of ``path`` when the block ends well and goes otherwise.

    Errors are as for :func:`output`. What SQLite leaves beside the temporary file goes too.
    """
    target = _real(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
    except OSError as error:
        error.filename = str(target)  # people know this name, not the temporary one
        raise
    part = Path(name)
    try:
        with os.fdopen(handle, "wb"):
            os.fchmod(handle, _mode_for(target))
        yield part
        _store_durably(part)
        if keep_equal and target.exists():
            if not filecmp.cmp(part, target, shallow=False):
                raise UsageError(f"{target} exists already, with other content; --force replaces it")
        else:
            part.replace(target)
    except OSError as error:
        if error.filename in (None, name):
            error.filename = str(target)  # a write that fails does not say where
        raise
    finally:
        for beside in ("", *_BESIDE):
            Path(name + beside).unlink(missing_ok=True)


def refuse_open_database(path: Path) -> None:
    """Raises UsageError where SQLite keeps something beside ``path``: what is open must not be replaced, and what is
    beside a database would be taken for a part of the new one."""
    target = _real(path)
    for beside in _BESIDE:
        if (there := Path(f"{target}{beside}")).exists():
            raise UsageError(
                f"{target} seems to be open in another program ({there.name} is beside it); close that, or choose "
                "another name"
            )


def _store_durably(part: Path) -> None:
    handle = os.open(part, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mode_for(target: Path) -> int:
    """The mode of the file that is replaced, or that of any new file."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
