"""Folders and files of this user alone: prompts and answers are nobody else's business."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from batchjobs.errors import BatchjobsError


def own_folder(path: Path) -> Path:
    """The folder, made with mode 700 where there is none. One that exists keeps its mode, and may be a link: what is
    made in it can be read by this user alone.

    Raises:
        BatchjobsError: It cannot be made, or it is somebody else's, who could exchange the database in it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise BatchjobsError(
            f"{path} cannot be created: {error.strerror}; set BATCHJOBS_HOME to another folder"
        ) from error
    if os.getuid() != 0 and owner not in (0, os.getuid()):
        raise BatchjobsError(f"{path} is another user's folder; set BATCHJOBS_HOME to a folder of your own")
    return path


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
