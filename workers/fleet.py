"""Several workers on this machine, one for each device or group of devices: started, watched, started again when one
dies, and ended together.

What it keeps true:
- The parent holds no shard and no device. Whatever dies, SQL's leases run out and another worker goes on; if the parent
  itself is killed, its workers end in good order.
- A worker that ended in good order (told to drain, or with nothing left to do) is not started again. One that died is,
  after a rest that grows. One that cannot even begin, or that dies again and again soon after its start, ends the
  fleet: restarting it for ever would hide what is wrong.
- The first SIGTERM or Ctrl-C is passed on once, and each worker then ends as :mod:`workers.shutdown` says; the second
  one is passed on too, and ends them at once. The workers have sessions of their own, so that a terminal's Ctrl-C
  reaches them only in this way.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchjobs.errors import UsageError
from batchjobs.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from batchjobs.settings import Settings

log = logging.getLogger("batchjobs.worker")

SOON_SECONDS = 300.0
"""A worker that dies within this time of its start died soon; loading a large model takes minutes."""

MAX_SOON = 3
"""So many times in a row, and the fleet ends."""

FIRST_REST_SECONDS, MAX_REST_SECONDS = 1.0, 30.0
KILL_SECONDS = 5.0
"""What a worker has after the second signal before it is killed."""

_TICK_SECONDS = 0.1
_COUNT_SECONDS = 120.0
_COUNT = "import torch; print(torch.cuda.device_count())"
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Member:
    """A worker to be kept alive: its name, where it computes, and its command line."""

    name: str
    device: str
    command: Sequence[str]


class _Child:
    """The process of a member, and when it is to be started (again). ``code`` is that of a process that ended."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.due_at: float | None = 0.0  # monotonic; None: not to be started
        self.starts = self.soon = 0
        self._started_at = 0.0

    def start(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            self.member.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.due_at, self._started_at, self.starts = None, time.monotonic(), self.starts + 1

    def poll(self) -> bool:
        """Whether its process has just ended."""
        if self.process is None or self.process.poll() is None:
            return False
        self.code, self.process = self.process.returncode, None
        is_soon = time.monotonic() - self._started_at < SOON_SECONDS
        self.soon = self.soon + 1 if is_soon else 1
        return True

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)  # says nothing to a process that has ended

    @property
    def how(self) -> str:
        assert self.code is not None
        if self.code < 0:
            return f"was killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        return f"ended with exit code {self.code}"


class Fleet:
    """The workers of one command.

    Args:
        environment: Of their processes.
        until: Asked now and then; the fleet ends in good order when it says True.
    """

    def __init__(
        self,
        members: Sequence[Member],
        environment: Mapping[str, str],
        *,
        until: Callable[[], bool] | None = None,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._children = [_Child(member) for member in members]
        self._environment = environment
        self._until = until
        self._draw = draw
        self._signals: list[int] = []  # that came, in their order
        self._passed = 0  # how many of them were passed on
        self._kill_at: float | None = None
        self._code: int | None = None  # why the fleet gave up
        self._is_ending = False

    def run(self) -> int:
        """Keeps them alive until told to end, or until all have ended in good order. Returns the exit code: 0 after an
        end in good order, else that of a worker that broke, or 128 and the number of a second signal."""
        with self._heard():
            try:
                while self._is_alive:
                    self._look()
                    time.sleep(_TICK_SECONDS)
            finally:
                self._kill()
        return self._exit_code()

    @property
    def _is_alive(self) -> bool:
        return any(child.process is not None or child.due_at is not None for child in self._children)

    def _look(self) -> None:
        if self._until is not None and not self._is_ending and self._until():
            self._end(signal.SIGTERM)
        while self._passed < len(self._signals):
            self._pass_on(self._signals[self._passed])
            self._passed += 1
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill()
        for child in self._children:
            if child.poll():
                self._judge(child)
        for child in self._children:
            if child.due_at is not None and time.monotonic() >= child.due_at:
                self._start(child)

    def _start(self, child: _Child) -> None:
        child.start(self._environment)
        assert child.process is not None
        member = child.member
        log.info("worker %s on %s is process %d", member.name, member.device, child.process.pid)

    def _judge(self, child: _Child) -> None:
        """What becomes of a worker that has just ended."""
        name = child.member.name
        if self._is_ending:
            return
        if child.code == 0:
            log.info("worker %s has ended in good order; it is not started again", name)
        elif child.starts == 1 and child.code == UsageError.exit_code:
            self._give_up(child, f"worker {name} cannot begin, see its message (exit code {child.code})")
        elif child.soon >= MAX_SOON:
            often = f"{child.soon} times in a row within {SOON_SECONDS:.0f} s of its start"
            self._give_up(child, f"worker {name} on {child.member.device} died {often}; the last time it {child.how}")
        else:
            rest = min(MAX_REST_SECONDS, FIRST_REST_SECONDS * 2 ** (child.soon - 1)) * self._draw(0.5, 1.5)
            child.due_at = time.monotonic() + rest
            log.error("worker %s %s; it is started again in %.1f s", name, child.how, rest)

    def _give_up(self, child: _Child, why: str) -> None:
        assert child.code is not None
        self._code = child.code if child.code > 0 else 128 - child.code
        others = sum(other.process is not None for other in self._children)
        log.error("%s. The fleet ends%s", why, f", and {plural(others, 'other worker')} with it" if others else "")
        self._end(signal.SIGTERM)

    # Ending

    def _end(self, number: int) -> None:
        self._is_ending = True
        for child in self._children:
            child.due_at = None
            child.signal(number)

    def _pass_on(self, number: int) -> None:
        is_first = self._passed == 0
        if is_first and self._is_ending:  # they were told, and a second signal would cut them off
            return
        how = "in good order" if is_first else "at once"
        log.info("got %s: the workers end %s", signal.Signals(number).name, how)
        self._end(number)
        if not is_first:
            self._kill_at = time.monotonic() + KILL_SECONDS

    def _kill(self) -> None:
        for child in self._children:
            child.due_at = None
            if child.process is not None:
                child.process.kill()
                child.process.wait()
                child.poll()

    def _exit_code(self) -> int:
        if len(self._signals) > 1:
            return 128 + self._signals[1]
        if self._code is not None:
            return self._code
        codes = [child.code for child in self._children if child.code]
        return next((code if code > 0 else 128 - code for code in codes), 0)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)


def run_fleet(
    settings: Settings, *, burst: bool = False, name: str | None = None, until: Callable[[], bool] | None = None
) -> int:
    """One worker for each device that is visible here, and the exit code when they have ended.

    With ``tensor_parallel_size`` N each worker has N devices. The workers are called ``name-0``, ``name-1``, …, and
    serve their metrics on the port of the settings, the next one, and so on (0 is any free port for each).

    Raises:
        UsageError: There are too few devices, or too few ports.
    """
    members = members_of(settings, visible_devices(), burst=burst, name=name)
    log.info("%s, one for each %s", plural(len(members), "worker"), _unit(settings))
    return Fleet(members, {**os.environ, **settings.as_environment()}, until=until).run()


def members_of(settings: Settings, devices: Sequence[str], *, burst: bool, name: str | None) -> list[Member]:
    """The workers for these devices. Raises UsageError."""
    size = settings.tensor_parallel_size
    count = len(devices) // size
    if count == 0:
        raise UsageError(f"tensor_parallel_size is {size}, but there are {plural(len(devices), 'device')} here")
    if spare := len(devices) - count * size:
        log.warning("%s of %d left over: each worker takes %d", plural(spare, "device"), len(devices), size)
    port = settings.metrics_port
    if port and port + count - 1 > _LAST_PORT:
        raise UsageError(f"metrics_port {port} leaves too few ports for {plural(count, 'worker')}")
    base = name or re.sub(r"[^A-Za-z0-9_.-]", "-", f"{socket.gethostname()[:60]}-{os.getpid()}")
    return [
        Member(
            name=f"{base}-{index}",
            device=devices[index * size],
            command=worker_command(f"{base}-{index}", devices[index * size], port + index if port else port, burst),
        )
        for index in range(count)
    ]


def worker_command(name: str, device: str, metrics_port: int | None, burst: bool) -> list[str]:
    """The command line of one worker, which ends when this process does. Its settings are in its environment."""
    command = [sys.executable, "-m", "batchjobs", "worker", "--parent", str(os.getpid())]
    command += ["--name", name, "--device", device]
    command += [] if metrics_port is None else ["--metrics-port", str(metrics_port)]
    return [*command, "--burst"] if burst else command


def visible_devices() -> list[str]:
    """``cuda:0``, ``cuda:1``, … as torch counts them, so within ``CUDA_VISIBLE_DEVICES``; in a process of its own,
    since this one needs nothing else of torch. Raises UsageError where there is none."""
    command = [sys.executable, "-c", _COUNT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"the devices cannot be counted, since torch does not load: {last}")
    count = int(done.stdout.split()[-1])
    if count == 0:
        raise UsageError(
            "torch sees no CUDA device here; use --device cpu, install a CUDA build of torch, or look at "
            "CUDA_VISIBLE_DEVICES"
        )
    return [f"cuda:{index}" for index in range(count)]


def _unit(settings: Settings) -> str:
    size = settings.tensor_parallel_size
    return "device" if size == 1 else f"{size} devices"
