"""End to end: submit, queue, a whole worker, and the rows read back from SQL, on the engine that is measured alone.

The worker runs in a thread of this process, with everything that it does in a process of its own: claiming, leases,
heartbeats, checkpoints, recording. So the engine is the very same, and nothing is loaded twice; that producer and
worker share one interpreter makes it rather slower than in real life. The clock runs from the call that submits to the
last row that has been read.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batchjobs.client import Client
from batchjobs.errors import BatchjobsError, UsageError
from workers.bench.system import OurEngine, Run, sampling_of
from workers.daemon import Daemon
from workers.engine.loop import EngineLoop
from workers.workloads import Work

if TYPE_CHECKING:
    from batchjobs.settings import Settings
    from batchjobs.types import Completion

START_SECONDS = 30.0
FIRST_LOOK_SECONDS, LONGEST_SECONDS = 0.01, 0.1  # between looks: neither late nor a load


@contextmanager
def measured_settings(settings: Settings, *, private: bool) -> Iterator[Settings]:
    """The settings with an empty private home, which vanishes; or as they are.

    Raises:
        UsageError: Somebody else works there, and could take the requests.
    """
    if private:
        with tempfile.TemporaryDirectory(prefix="batchjobs-bench-") as folder:
            yield settings.model_copy(update={"home": Path(folder), "database_url": None, "redis_url": None})
        return
    with Client(settings) as client:
        living = [worker.name for worker in client.store.workers() if worker.is_alive]
    if living:
        raise UsageError(f"the worker {living[0]} lives in this database and would take part; stop it first")
    yield settings


class EndToEnd:
    """One batch a run."""

    name = "batchjobs end to end"

    def __init__(self, ours: OurEngine, settings: Settings) -> None:
        self._ours = ours
        together = ours.engine.config.max_requests_per_batch
        self._settings = settings.model_copy(update={"max_requests_per_batch": together})
        self.parts: dict[str, float] = {}  # seconds of the last run

    def run(self, work: Sequence[Work]) -> Run:
        self._ours.engine.pool.forget()
        lines = [self._line(item) for item in work]
        with Client(self._settings) as client, self._worker(client) as lives:
            begin = time.perf_counter()
            batch = client.submit(lines)
            submitted = time.perf_counter()
            _wait(client, batch.id, lives)
            ended = time.perf_counter()
            made = [_made(client, batch.id, result.completion) for result in client.store.results(batch.id)]
            read = time.perf_counter()
        self.parts = {"submit": submitted - begin, "answer": ended - submitted, "read": read - ended}
        return Run(read - begin, made)

    def _line(self, item: Work) -> dict[str, object]:
        sampling = sampling_of(item, respects_eos=self._ours.respects_eos)
        fields = sampling.as_fields()
        return {"prompt": list(item.prompt_ids), **fields}

    @contextmanager
    def _worker(self, client: Client) -> Iterator[Callable[[], bool]]:
        """A worker that is ready to claim; whether it lives."""
        loop = EngineLoop(self._ours.engine)
        daemon = Daemon(self._settings, client.store, client.queue, loop)
        thread = threading.Thread(target=daemon.run, name="bench-worker", daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + START_SECONDS
            while not loop.is_running:
                if time.monotonic() > deadline or not thread.is_alive():
                    raise BatchjobsError("the worker did not start; the log says why")
                time.sleep(FIRST_LOOK_SECONDS)
            yield thread.is_alive
        finally:
            daemon.stop("measured")
            thread.join(START_SECONDS)
        if thread.is_alive():
            raise BatchjobsError("the worker did not stop, and would take part in what is measured next")


def _wait(client: Client, batch_id: str, lives: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not client.store.batch(batch_id).status.is_final:
        if not lives():
            raise BatchjobsError(f"the worker ended before batch {batch_id} did; the log says why")
        time.sleep(min(LONGEST_SECONDS, max(FIRST_LOOK_SECONDS, (time.monotonic() - begin) / 100)))


def _made(client: Client, batch_id: str, completion: Completion | None) -> int:
    """Tokens in a row, each of which must have its logprob and its time."""
    if completion is None or completion.error is not None:
        reason = "there is no row" if completion is None or completion.error is None else completion.error.message
        raise BatchjobsError(f"a request of batch {batch_id} has no answer: {reason}")
    lengths = {len(completion.token_ids), len(completion.logprobs), len(completion.token_times)}
    if len(lengths) > 1:
        raise BatchjobsError(f"a row of batch {batch_id} lacks logprobs or times")
    return completion.completion_tokens
