"""What a container's limits are: the cgroups of this process, in both versions of the kernel's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders that may hold a controller's files for this process, its own group before those above it; and whether
    these files are those of version 2."""
    with suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from ((folder, True) for folder in _upwards(CGROUPS, path))
            elif controller in controllers.split(","):
                for name in (controllers, controller):
                    yield from ((folder, False) for folder in _upwards(CGROUPS / name, path))


def memory_limit() -> int | None:
    """The most bytes that this process and its neighbours in the tightest group may take; None without a limit."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_left() -> int | None:
    """Bytes of that which nobody has taken yet. The file cache counts as free: the kernel takes it back first."""
    return min((max(0, limit - taken) for limit, taken in _memory()), default=None)


def _memory() -> Iterator[tuple[int, int]]:
    """Limits, and what is taken of each."""
    for folder, is_unified in cgroup_folders("memory"):
        with suppress(OSError, ValueError):
            yield _unified_memory(folder) if is_unified else _legacy_memory(folder)


def _unified_memory(folder: Path) -> tuple[int, int]:
    limit = int((folder / "memory.max").read_text())  # "max" is a ValueError: no limit
    return limit, int((folder / "memory.current").read_text()) - _file_cache(folder, "inactive_file")


def _legacy_memory(folder: Path) -> tuple[int, int]:
    limit = int((folder / "memory.limit_in_bytes").read_text())
    return limit, int((folder / "memory.usage_in_bytes").read_text()) - _file_cache(folder, "total_inactive_file")


def _file_cache(folder: Path, name: str) -> int:
    with suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """A group and all above it. Within a container the path is often the host's, and only the root is there."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        if folder != root and root not in folder.parents:
            return
        yield folder
