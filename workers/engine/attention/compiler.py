"""Builds the C++ kernel with the system's compiler, once for a machine and a source, and loads it.

Kept true here:
- A library appears in the cache folder whole or not at all, however many processes build it at the same time.
- Its name says what it was built from and for: source with the headers beside it, flags, compiler and processor. A
  changed one is another file.
- Nobody but this user could have put it there.
- Whatever goes wrong ends in `KernelError` with a sentence for people, never in a crash of the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from batchjobs.errors import UsageError
from workers.engine.folders import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: a NaN must stay a NaN in its own sequence. Contraction makes every a * b + c one fused operation,
# in every copy of a loop alike.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast"),
    *("-fopenmp", "-shared", "-fPIC", "-w"),
)
_BUILD_SECONDS = 300
_INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class KernelError(Exception):
    """The kernel cannot be used here; the message says why and what would help."""


def load_kernel(source: Path) -> ctypes.CDLL:
    """Load the kernel of this source, building it first where the cache folder has none yet."""
    if os.environ.get("BATCHJOBS_NO_COMPILE", "0") not in ("", "0"):
        raise KernelError("BATCHJOBS_NO_COMPILE is set")
    folder = _private_folder()
    failures = []
    for compiler in _compilers():
        try:
            return _build_and_load(source, folder, compiler)
        except KernelError as failure:
            failures.append(str(failure))
    if not failures:
        looked = ", ".join(COMPILERS)
        raise KernelError(f"no C++ compiler was found (looked for {looked}); install g++ or set CXX")
    raise KernelError("; ".join(failures))


def check_layouts(library: ctypes.CDLL, kernel: str, **mirrors: type[ctypes.Structure]) -> None:
    """Compare the size of each structure, as the library's `batchjobs_<name>_size` tells it, with its mirror's here.

    Raises:
        ValueError: The library was built from a source with other structures.
    """
    for name, mirror in mirrors.items():
        size = getattr(library, f"batchjobs_{name}_size")
        size.restype = ctypes.c_int64
        if size() != ctypes.sizeof(mirror):
            what = name.replace("_", " ")
            raise ValueError(f"{kernel} and its Python side disagree about the layout of {what}s")


def _compilers() -> list[str]:
    """Paths of the compilers to try, the user's choice first; one path once."""
    names = [os.environ.get("CXX", ""), *COMPILERS]
    found = (shutil.which(name) for name in names if name)
    return list(dict.fromkeys(os.path.realpath(path) for path in found if path))


def _private_folder() -> Path:
    try:
        folder = cache_folder() / "kernels"
    except UsageError as error:
        raise KernelError(str(error)) from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise KernelError(
            f"the cache folder {folder} cannot be used ({error.strerror}); set BATCHJOBS_CACHE to a folder of your own"
        ) from None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelError(
            f"other users could write to the cache folder {folder}; make it yours alone (chmod 700), "
            f"or set BATCHJOBS_CACHE to another"
        )
    return folder


def _build_and_load(source: Path, folder: Path, compiler: str) -> ctypes.CDLL:
    library = folder / f"{source.stem}-{_key(source, compiler)}.so"
    try:
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _build(source, library, compiler)
            try:
                return ctypes.CDLL(str(library))
            except OSError:  # a damaged file: the disk was full, or it was copied here in part
                library.unlink(missing_ok=True)
                _build(source, library, compiler)
                return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelError(f"the library that {compiler} built cannot be loaded: {error}") from None


def _build(source: Path, library: Path, compiler: str) -> None:
    """Compile beside the target and move the result into its place."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *FLAGS, str(source), "-o", str(made)]
        try:
            done = _run(command)
        except subprocess.TimeoutExpired:
            raise KernelError(f"{compiler} did not finish within {_BUILD_SECONDS} seconds") from None
        if done.returncode or not made.exists():
            raise KernelError(f"{compiler} failed: {_first_error(done.stderr)}")
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(library)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=_BUILD_SECONDS,
        env=environment,
        check=False,
    )


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it gave no reason")


def _key(source: Path, compiler: str) -> str:
    """Names everything that the built code depends on."""
    try:
        parts = [*_texts(source), " ".join(FLAGS), compiler, _run([compiler, "--version"]).stdout, _processor()]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{compiler} cannot be run: {error}") from None
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _texts(source: Path) -> list[str]:
    """The text of a source and of every header that it includes in quotes, each once."""
    texts: dict[Path, str] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in texts:
            texts[path] = path.read_text()
            waiting += [(path.parent / name).resolve() for name in _INCLUDED.findall(texts[path])]
    return list(texts.values())


def _processor() -> str:
    """Model and instruction sets: -march=native builds for exactly these."""
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                found.setdefault(name.strip(), value.strip())
    return f"{platform.machine()} {platform.processor()} {sorted(found.items())}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time; the others find its result. The lock ends with its holder, even a killed one."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network folders cannot lock: then several build, and the last stays
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
