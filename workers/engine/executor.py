"""Who runs the device's side of a step: at once, or a thread that works while the host plans the next step.

On a GPU the device itself works beside the host, so the calls are made at once; on a CPU one thread stands for it. Both
keep the order of the calls, so the state machine around them is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceExecutor(Protocol):
    """Runs calls one after the other. A call that raised keeps its error in the future."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...

    def shutdown(self) -> None: ...


class Inline:
    """Runs each call before ``submit`` returns."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # raised again where the result is asked for
            future.set_exception(error)
        try:
            return future
        finally:
            del future  # an error's traceback has this frame: they would keep each other, and all that the call saw

    def shutdown(self) -> None:
        pass


class OneThread:
    """Runs the calls in a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._pool.submit(call, *args, **kwargs)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
