"""Claims and finishes shards of a batch as fast as it can, in a process of its own. Prints how many it finished."""

from __future__ import annotations

import sys

from batchjobs.store import Store
from tests.support.batches import FOREVER, answer


def main(url: str, batch_id: str, worker: str) -> None:
    store = Store(url)
    store.prepare()
    finished = 0
    while claimable := store.claimable(4):
        for lease in store.claim([shard for shard, _ in claimable], worker, FOREVER):
            assert lease.shard.batch_id == batch_id
            for pending in store.pending_requests(lease):
                finished += len(store.record([(lease, answer(pending.index))]).done)
    store.close()
    print(finished)


if __name__ == "__main__":
    main(*sys.argv[1:])
