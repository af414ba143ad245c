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
    from collections.abc import Iterator, Sequence


def check_target(path: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Raises UsageError when ``path`` cannot or should not be written, before any work is done."""
    for source in inputs:
        with contextlib.suppress(OSError):
            if path.samefile(source):
                raise UsageError(f"{path} is the input file; choose another name for the output")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"the folder {path.absolute().parent} does not exist; create it first")
    if not force and path.is_file():
        raise UsageError(f"{path} exists already; --force replaces it")


@contextlib.contextmanager
def output(path: Path | None, *, keep_equal: bool = False) -> Iterator[BinaryIO]:
    """A stream that ends up whole in ``path`` (stdout when None), or not at all.

    It is written to a temporary file beside its target and renamed at the end; a link's target is replaced, not the
    link. Pipes and devices are written directly. With ``keep_equal``, a file with the same content stays untouched and
    one with other content is refused.
    """
    if path is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
    else:
        with _replacing(Path(os.path.realpath(path)), keep_equal) as stream:
            yield stream


@contextlib.contextmanager
def _replacing(target: Path, keep_equal: bool) -> Iterator[BinaryIO]:
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb", 2**20) as stream:
            os.fchmod(stream.fileno(), _mode_for(target))
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if keep_equal and target.exists():
            if not filecmp.cmp(part, target, shallow=False):
                raise UsageError(f"{target} exists already, with other content; --force replaces it")
            part.unlink()
        else:
            part.replace(target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target)  # a write that fails does not say where
        raise


def _mode_for(target: Path) -> int:
    """The mode of the file that is replaced, or that of any new file."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
