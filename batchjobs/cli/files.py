"""Output files: never half-written, never over something else by mistake."""

from __future__ import annotations

import contextlib
import filecmp
import io
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BESIDE = ("-journal", "-wal", "-shm")
"""What SQLite keeps beside a database while it is open."""


class Kept(UsageError):
    """A file has appeared where a new one was to go. It was left alone, and what was made is kept beside it."""


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
def output(path: Path | None, *, keep_equal: bool = False, new: bool = False) -> Iterator[BinaryIO]:
    """A stream that ends up whole in ``path`` (stdout when None), or not at all.

    It is written to a temporary file beside its target and renamed at the end; a link's target is replaced, not the
    link. Pipes and devices are written directly. With ``keep_equal``, a file with the same content stays untouched and
    one with other content is refused. With ``new``, a file that has appeared meanwhile stays: see :class:`Kept`.
    """
    if path is None:
        with _standard_output() as stream:
            yield stream
    elif not is_replaced(path):
        with io.BufferedWriter(_NamedFile(path, "wb")) as stream:
            yield stream
    else:
        with (
            replacing(path, keep_equal=keep_equal, new=new) as part,
            io.BufferedWriter(_NamedFile(part, "wb"), 2**20) as stream,
        ):
            yield stream


class _NamedFile(io.FileIO):
    """A file whose failures to write say its name, as those to open it do."""

    def write(self, data: Any, /) -> int:
        with _naming(str(self.name)):
            return super().write(data)

    def close(self) -> None:
        with _naming(str(self.name)):
            super().close()


@contextlib.contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    with _naming("standard output"):
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Gives this name to what failed where nothing else is named."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = name
        raise


@contextlib.contextmanager
def replacing(path: Path, *, keep_equal: bool = False, new: bool = False) -> Iterator[Path]:
    """An empty temporary file, which takes the place of ``path`` when the block ends well and goes otherwise.

    Options and errors are as for :func:`output`. What SQLite leaves beside the temporary file goes too.
    """
    target = _real(path)
    part = _temporary_file(target)
    waste = [Path(f"{part}{beside}") for beside in ("", *_BESIDE)]
    kept = []
    try:
        part.chmod(_mode_for(target))
        try:
            yield part
        except Kept as error:  # by another output of the same command; this one is whole all the same
            kept.append(str(error))
        _store_durably(part)
        if not _put(part, target, keep_equal=keep_equal, new=new):
            waste.remove(part)
            kept.append(f"{target} has appeared meanwhile and stays as it is; what was to go there is whole in {part}")
        if kept:
            raise Kept("; ".join(kept))
    except OSError as error:
        if error.filename == str(part):
            error.filename = str(target)  # people know this name, not the temporary one
        raise
    finally:
        for file in waste:
            file.unlink(missing_ok=True)


def _temporary_file(target: Path) -> Path:
    beginning = os.fsencode(target.name)[:100].decode(errors="ignore")  # the name has a limit of 255 bytes too
    try:
        handle, name = tempfile.mkstemp(prefix=f".{beginning}.", suffix=".part", dir=target.parent)
    except OSError as error:
        error.filename = str(target)
        raise
    os.close(handle)
    return Path(name)


def _put(part: Path, target: Path, *, keep_equal: bool, new: bool) -> bool:
    """Gives the file its name. Returns False where it is to be new and is not."""
    if not (keep_equal or new):
        part.replace(target)
    elif not _placed(part, target):
        if new:
            return False
        if not filecmp.cmp(part, target, shallow=False):
            raise UsageError(f"{target} exists already, with other content; --force replaces it")
    return True


def _placed(part: Path, target: Path) -> bool:
    """Gives the file its name, unless something has it already; returns whether it did."""
    try:
        os.link(part, target)  # in one step, unlike a look and a renaming
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if os.path.lexists(target):
            return False
        part.replace(target)
    return True


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
        with _naming(str(part)):
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
