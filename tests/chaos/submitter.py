"""One submission in a process of its own, which stops in the middle to be killed there.

python -m tests.chaos.submitter FILE KEY SHARD_SIZE CHUNK_REQUESTS

It says "halted" when the first chunk is stored, and waits.
"""

from __future__ import annotations

import sys
import time

from batchjobs import submission
from batchjobs.client import Client
from batchjobs.inputs import open_source
from batchjobs.submission import Plan


def main(path: str, key: str, shard_size: str, chunk: str) -> None:
    submission.CHUNK_REQUESTS = int(chunk)

    def halt(stored: int) -> None:
        print("halted", stored, flush=True)
        time.sleep(600)

    with Client() as client:
        plan = Plan(key=key, shard_size=int(shard_size))
        submission.submit(client.store, lambda: client.queue, [open_source(path)], plan, halt)


if __name__ == "__main__":
    main(*sys.argv[1:])
