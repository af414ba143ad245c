"""``python -m workers.engine.parallel.follower FD``: a process that does its part of each forward pass it is told of.

It ends when the driver's end of the socket is gone: at once, since what it waits for may never come then.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.engine.parallel.loading import Split
    from workers.engine.parallel.messages import Load, Message
    from workers.engine.parallel.runners import RankRunner


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the driver decides, and needs this process for its end
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    from workers.engine.parallel.messages import Failed, send

    try:
        _follow(_told(connection), connection)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the driver is to know
        with suppress(OSError):
            send(connection, Failed(*_reason(error)))
        _leave(1)


def _told(connection: socket.socket) -> Iterator[Message]:
    """What the driver says. A thread hears it, so that the driver's end is noticed whatever this one waits for."""
    from workers.engine.parallel.messages import Begin, messages

    heard: SimpleQueue[Message] = SimpleQueue()
    folders: list[Path] = []

    def hear() -> None:
        for message in messages(connection):
            if isinstance(message, Begin):
                folders.append(Path(message.store).parent)
            heard.put(message)
        for folder in folders:  # a driver that was killed has left it
            shutil.rmtree(folder, ignore_errors=True)
        _leave(0)

    threading.Thread(target=hear, name="driver", daemon=True).start()
    while True:
        yield heard.get()


def _follow(told: Iterator[Message], connection: socket.socket) -> None:
    import torch

    from workers.engine.parallel.loading import Split
    from workers.engine.parallel.messages import Begin, Forward, Here, Load, send
    from workers.engine.parallel.ranks import join

    begin = next(told)
    assert isinstance(begin, Begin)
    split = Split(begin.rank, begin.size, torch.device(begin.device))
    send(connection, Here())
    join(split, Path(begin.store))
    runner: RankRunner | None = None
    for order in told:
        if isinstance(order, Load):
            if runner is not None:
                runner.release()
            runner = _runner(order, split)
        else:
            assert isinstance(order, Forward)
            assert runner is not None
            runner.forward(order.batch, order.copies)


def _runner(order: Load, split: Split) -> RankRunner:
    """Made while the driver makes its own."""
    from workers.engine.config import EngineConfig
    from workers.engine.models import load_model
    from workers.engine.parallel.runners import RankRunner

    config = EngineConfig(**order.config)
    loaded = load_model(order.model, device=split.device, dtype=config.dtype, revision=order.revision, split=split)
    return RankRunner(loaded, config, min(config.max_model_len or loaded.max_model_len, loaded.max_model_len), split)


def _reason(error: BaseException) -> tuple[str, bool]:
    """What the driver is told, and whether it is a refusal."""
    from batchjobs.errors import UsageError

    if isinstance(error, UsageError):
        return str(error), True
    return f"another part of the model failed: {type(error).__name__}: {error}", False


def _leave(code: int) -> None:
    """Without ado: what is left of the group cannot be wound up any more."""
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
