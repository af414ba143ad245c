"""Folders and files of this user alone: prompts and answers are nobody else's business."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from pathlib import Path

from batchjobs.errors import BatchjobsError

DATABASE_FILE = "batchjobs.sqlite3"
_BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite reads together with a database: it takes changes from there."""


def own_folder(path: Path) -> Path:
    """The folder, made with mode 700 where there is none. One that exists keeps its mode, and may be a link: what is
    made in it can be read by this user alone.

    Raises:
        BatchjobsError: It cannot be made, or others could exchange the database in it or did so: the folder or the
            database is somebody else's, or everybody can write there. A group that may write is the owner's choice.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise BatchjobsError(
            f"{path} cannot be created: {error.strerror}; set BATCHJOBS_HOME to another folder"
        ) from error
    own = "set BATCHJOBS_HOME to a folder of your own"
    if os.getuid() != 0 and found.st_uid not in (0, os.getuid()):
        raise BatchjobsError(f"{path} is another user's folder; {own}")
    if found.st_mode & stat.S_IWOTH:
        is_shared = found.st_mode & stat.S_ISVTX or found.st_uid != os.getuid()  # such as /tmp: it shall stay so
        mend = "" if is_shared else f", or run: chmod o-w {shlex.quote(str(path))}"
        raise BatchjobsError(f"every user can write in {path} and exchange the database; {own}{mend}")
    _refuse_planted(path, {0, os.getuid(), found.st_uid})
    return path


def _refuse_planted(home: Path, owners: set[int]) -> None:
    """Raises BatchjobsError where the database, or a link in its place, belongs to none of the ``owners``: users who
    could exchange it in any case."""
    for end in ("", *_BESIDE):
        file = home / f"{DATABASE_FILE}{end}"
        for look in (os.lstat, os.stat):
            with contextlib.suppress(OSError):  # most are not there
                if look(file).st_uid not in owners:
                    raise BatchjobsError(
                        f"{file} belongs to another user, who could read and change what is stored; move it away, or "
                        "set BATCHJOBS_HOME to a folder of your own"
                    )


def private_folder(path: Path) -> Path:
    """Creates ``path`` for this user alone. Refuses a link and somebody else's folder: both could be planted."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise BatchjobsError(f"{path} is not a folder of this user's own; remove it, or set BATCHJOBS_HOME")
        if stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise BatchjobsError(
            f"{path} cannot be created: {error.strerror}; set BATCHJOBS_HOME to another folder"
        ) from error
    return path


def make_private_file(path: Path) -> None:
    """An empty file with mode 600, where there is none. What stands in the way is left to whoever opens it."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
