"""Results that are followed: in input order, each when its turn has come, until the batch has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchjobs.errors import NotFound
from batchjobs.following import follow_results
from batchjobs.types import BatchStatus, RequestStatus
from tests.support.batches import GONE, answer, claim, create, failure, finish, request, submit
from tests.support.cases import case

if TYPE_CHECKING:
    from batchjobs.store import Store
    from batchjobs.types import BatchInfo

QUICK = 0.005


@case("A-out-01")
def test_each_comes_when_all_before_it_have_ended(store: Store) -> None:
    """The last shard ends first; the first one is given back by nobody until the reader has waited for it."""
    batch_id = submit(store, 6, shard_size=2)
    first, second, third = (claim(store, batch_id, number) for number in range(3))
    finish(store, third)
    looks: list[list[int]] = []
    came: list[int] = []

    def seen(info: BatchInfo) -> None:
        """What happens between two looks."""
        looks.append(came.copy())
        if len(looks) == 2:
            store.record([(first, answer(1))])
        elif len(looks) == 3:
            store.record([(first, failure(0))])
        elif len(looks) == 5:
            finish(store, second)

    for found in follow_results(store, batch_id, poll_seconds=QUICK, seen=seen):
        came.append(found.request.index)
    assert came == [0, 1, 2, 3, 4, 5]
    # At the first two looks nothing, at the third the failure has come behind it: both, and then all the rest at once.
    assert [len(look) for look in looks[:6]] == [0, 0, 0, 2, 2, 6]


def test_it_goes_on_behind_a_request(store: Store) -> None:
    batch_id = submit(store, 4)
    finish(store, claim(store, batch_id))
    assert [found.request.index for found in follow_results(store, batch_id, after_index=1)] == [2, 3]


def test_nothing_is_read_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look begins behind what has come: also at the end of a long batch it reads no more than the next page."""
    batch_id = submit(store, 8, shard_size=2)
    leases = [claim(store, batch_id, number) for number in range(4)]
    asked: list[int] = []
    results = store.results

    def counted(batch_id: str, *, after_index: int) -> object:
        asked.append(after_index)
        if leases:
            finish(store, leases.pop(0))
        return results(batch_id, after_index=after_index)

    monkeypatch.setattr(store, "results", counted)
    assert len(list(follow_results(store, batch_id, poll_seconds=QUICK))) == 8
    assert asked == [-1, 1, 3, 5, 7]


def test_a_batch_that_still_loads_is_waited_for(store: Store) -> None:
    batch_id = create(store, shard_size=2)
    store.add_requests(batch_id, [request(0)])
    seen: list[BatchStatus] = []

    def load(info: BatchInfo) -> None:
        seen.append(info.status)
        if len(seen) == 2:
            store.add_requests(batch_id, [request(1)])
            store.open_batch(batch_id)
            finish(store, claim(store, batch_id))

    assert len(list(follow_results(store, batch_id, poll_seconds=QUICK, seen=load))) == 2
    assert seen == [BatchStatus.LOADING, BatchStatus.LOADING, BatchStatus.COMPLETED]


def test_it_ends_with_a_cancelled_batch_whose_worker_has_died(store: Store) -> None:
    """Nobody else may be there to end what the worker held."""
    batch_id = submit(store, 3)
    claim(store, batch_id, ttl=GONE)
    held = claim(store, batch_id, ttl=0.2)
    store.record([(held, answer(0))])
    store.cancel_batch(batch_id)
    states = [found.state for found in follow_results(store, batch_id, poll_seconds=QUICK)]
    assert states == [RequestStatus.COMPLETED, RequestStatus.CANCELLED, RequestStatus.CANCELLED]


def test_a_paused_batch_is_waited_for(store: Store) -> None:
    batch_id = submit(store, 2)
    store.pause_batch(batch_id, by="ann@desk")
    looks: list[bool] = []

    def resume(info: BatchInfo) -> None:
        looks.append(info.paused)
        if len(looks) == 3:
            store.resume_batch(batch_id)
            finish(store, claim(store, batch_id))

    assert len(list(follow_results(store, batch_id, poll_seconds=QUICK, seen=resume))) == 2
    assert looks[:3] == [True, True, True]


def test_a_retry_meanwhile_is_no_end(store: Store) -> None:
    """A batch that has ended and is retried while it is read is followed to its second end."""
    batch_id = submit(store, 3)
    lease = claim(store, batch_id)
    store.record([(lease, failure(0)), (lease, answer(1)), (lease, failure(2))])
    looks: list[BatchStatus] = []

    def retry(info: BatchInfo) -> None:
        looks.append(info.status)
        if len(looks) == 1:
            store.retry_failed(batch_id)
        elif len(looks) == 3:
            finish(store, claim(store, batch_id))

    states = [found.state for found in follow_results(store, batch_id, poll_seconds=QUICK, seen=retry)]
    assert looks[:2] == [BatchStatus.COMPLETED, BatchStatus.RUNNING]
    assert states == [RequestStatus.COMPLETED] * 3


def test_an_unknown_batch_and_one_that_was_taken_back_are_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        next(follow_results(store, "B"))
    batch_id = create(store)
    store.add_requests(batch_id, [request(0)])
    following = follow_results(store, batch_id, poll_seconds=QUICK, seen=lambda info: store.discard_batch(batch_id))
    with pytest.raises(NotFound):
        next(following)
