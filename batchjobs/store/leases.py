"""Leases: which worker may write a shard's outcomes, and until when.

The fence of a shard grows with every claim and never shrinks. A lease is its holder's as long as the shard is leased
under the same fence, even past its end, until somebody else claims the shard or closes it.

Every claim counts as a crash until the shard is given back. Nobody can claim a shard that has crashed too often: see
:mod:`batchjobs.store.isolation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from batchjobs.clock import database_instant, database_seconds
from batchjobs.store.bulk import fetch_all
from batchjobs.store.conditions import IS_NAMED, IS_UNFINISHED, OUTCOMES, free_at, in_range
from batchjobs.store.locks import locked_shards, named
from batchjobs.store.part import Part
from batchjobs.store.rows import PENDING_COLUMNS, pending_request_of
from batchjobs.tables import batches, completions, requests, shards
from batchjobs.types import Lease, Priority, ShardId

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy.engine import Connection, Row

    from batchjobs.types import Request


SPLIT_AT = 2
"""A shard of several requests that crashed so often is replaced by one shard a request."""
ALONE_AT = 3
"""A single request that crashed so often, in its shard and by itself, runs with nothing beside it."""
FAIL_AT = 5
"""A single request that crashed so often is given up."""


class LeasePart(Part):
    def claimable(
        self,
        limit: int,
        *,
        after: ShardId | None = None,
        models: Collection[str] | None = None,
        version: str | None = None,
        begun: bool = False,
    ) -> list[tuple[ShardId, Priority]]:
        """Shards that a worker could claim now, those of the oldest batch first; from behind ``after`` where given.

        Args:
            models: The names that the worker's model goes by: shards of batches that ask for another one are left out.
                None leaves out none.
            version: The version of that model: shards that are pinned to another one are left out. None leaves out
                none.
            begun: Only those that some worker has held before.
        """
        start = after or ShardId("", -1)
        place = {"after_batch": start.batch_id, "after_shard": start.shard_no, "least_fence": int(begun)}
        parameters = {"limit": limit, **place, **_served(models, version)}
        with self._database.reading() as connection:
            rows = connection.execute(_CLAIMABLE, parameters)
            return [(ShardId(row.batch_id, row.shard_no), Priority(row.queue)) for row in rows]

    def claimable_count(self, models: Collection[str] | None = None, version: str | None = None) -> int:
        """How many shards a worker with such a model (or with any) could claim now."""
        with self._database.reading() as connection:
            return connection.execute(_CLAIMABLE_COUNT, _served(models, version)).scalar_one()

    def holders(self, models: Collection[str] | None = None, version: str | None = None) -> dict[str, float]:
        """Workers under whose name unfinished shards are leased that such a model (or any) could go on with, each with
        the earliest end of these leases: seconds since 1970 by the database's clock. One that lives puts it off."""
        with self._database.reading() as connection:
            return {row.owner: row.until for row in connection.execute(_HOLDERS, _served(models, version))}

    def for_other_models(
        self, wanted: Collection[ShardId], models: Collection[str] | None, version: str | None = None
    ) -> set[ShardId]:
        """Which of these shards are unfinished and not for such a model: of batches that ask for none of these names,
        or pinned to another version."""
        with self._database.reading() as connection:
            return {
                ShardId(row.batch_id, row.shard_no)
                for parameters in named(wanted)
                for row in connection.execute(_FOR_OTHERS, {**parameters, **_served(models, version)})
            }

    def claim(
        self,
        wanted: Sequence[ShardId],
        worker: str,
        ttl_seconds: float,
        models: Collection[str] | None = None,
        version: str | None = None,
    ) -> list[Lease]:
        """Leases those of the shards that are claimable with such a model (see :meth:`claimable`); of several workers
        that try at once, one gets each shard. A request whose workers died too often comes as ``alone``."""
        if not wanted:
            return []
        terms = {"worker": worker, "ttl": ttl_seconds, **_served(models, version)}
        with self._database.writing() as connection:
            leases = [
                _lease(row)
                for parameters in named(wanted)
                for row in connection.execute(_CLAIM, {**parameters, **terms})
            ]
        return sorted(leases, key=lambda lease: (lease.shard.batch_id, lease.shard.shard_no))

    def pending_requests(self, lease: Lease) -> list[Request]:
        """The requests of the shard that have no outcome, by index."""
        with self._database.reading() as connection:
            inside, ended = limits_of(connection, lease.shard)
            finished = {index for (index,) in fetch_all(connection, _FINISHED, inside)} if ended else set()
            rows = fetch_all(connection, _REQUESTS, inside) if inside else []
        return [pending_request_of(row) for row in rows if row[0] not in finished]

    def renew(self, leases: Collection[Lease], ttl_seconds: float) -> set[ShardId]:
        """Prolongs the leases, from now on. Returns the shards that are still ours; the others are lost."""
        with self._database.writing() as connection:
            held = _still_held(connection, leases)
            for parameters in named(held):
                connection.execute(_RENEW, {**parameters, "ttl": ttl_seconds})
            return held

    def release(self, leases: Collection[Lease]) -> None:
        """Gives shards back in good order, which does not count as an attempt. Lost leases are passed over."""
        with self._database.writing() as connection:
            for parameters in named(_still_held(connection, leases)):
                connection.execute(_RELEASE, parameters)


def limits_of(connection: Connection, shard: ShardId) -> tuple[dict[str, Any], int]:
    """Parameters for in_range, and how many requests have ended; no parameters where the shard is not there any more.

    Only who holds the shard, or its row's lock, adds outcomes, and counts them in the same transaction.
    """
    found = fetch_all(connection, _LIMITS, {"batch": shard.batch_id, "number": shard.shard_no})
    if not found:
        return {}, 0
    [(first, last, ended)] = found
    return {"batch": shard.batch_id, "first": first, "last": last}, ended


def _lease(claimed: Row[Any]) -> Lease:
    shard = ShardId(claimed.batch_id, claimed.shard_no)
    is_alone = _must_be_alone(claimed)
    return Lease(shard, claimed.fence, claimed.attempts, alone=is_alone, model_version=claimed.model_version)


def _must_be_alone(claimed: Row[Any]) -> bool:
    crashes_before: int = claimed.attempts - 1 - claimed.forgiven
    return bool(claimed.requests == 1 and crashes_before >= ALONE_AT)


def _served(models: Collection[str] | None, version: str | None) -> dict[str, Any]:
    """Parameters for _IS_SERVED."""
    by_name = {"any_model": models is None, "models": sorted(models or ())}
    return by_name | {"any_version": version is None, "version": version or ""}


def _still_held(connection: Connection, leases: Collection[Lease]) -> set[ShardId]:
    rows = locked_shards(connection, [lease.shard for lease in leases])
    states = {shard: (row.state, row.fence) for shard, row in rows.items()}
    return {lease.shard for lease in leases if states.get(lease.shard) == ("leased", lease.fence)}


# Right for shards that nobody holds: a claim that is still good is among the attempts, too.
CRASHED_TOO_OFTEN = shards.c.attempts - shards.c.forgiven >= sa.case((shards.c.requests > 1, SPLIT_AT), else_=FAIL_AT)
_IS_CLAIMABLE = (
    IS_UNFINISHED,
    free_at(database_seconds()),
    sa.not_(CRASHED_TOO_OFTEN),
    batches.c.submitted_at.is_not(None),
    batches.c.cancel_requested_at.is_(None),
    batches.c.paused_at.is_(None),
)
_IS_SERVED = sa.and_(
    sa.or_(
        sa.bindparam("any_model", type_=sa.Boolean),
        batches.c.model.is_(None),
        batches.c.model.in_(sa.bindparam("models", expanding=True, type_=sa.Text)),
    ),
    sa.or_(
        sa.bindparam("any_version", type_=sa.Boolean),
        shards.c.model_version.is_(None),
        shards.c.model_version == sa.bindparam("version", type_=sa.Text),
    ),
)
_HOLDERS = (
    sa.select(shards.c.owner, sa.func.min(shards.c.lease_until).label("until"))
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(IS_UNFINISHED, shards.c.state == "leased", _IS_SERVED)
    .where(batches.c.cancel_requested_at.is_(None), batches.c.paused_at.is_(None))
    .group_by(shards.c.owner)
)
_FOR_OTHERS = (
    sa.select(shards.c.batch_id, shards.c.shard_no)
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(IS_NAMED, IS_UNFINISHED, sa.not_(_IS_SERVED))
)
_CLAIMABLE = (
    sa.select(shards.c.batch_id, shards.c.shard_no, batches.c.queue)
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(*_IS_CLAIMABLE, _IS_SERVED, shards.c.fence >= sa.bindparam("least_fence", type_=sa.BigInteger))
    .where(
        sa.tuple_(shards.c.batch_id, shards.c.shard_no)
        > sa.tuple_(sa.bindparam("after_batch", type_=sa.Text), sa.bindparam("after_shard", type_=sa.Integer))
    )
    .order_by(shards.c.batch_id, shards.c.shard_no)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_CLAIMABLE_COUNT = (
    sa.select(sa.func.count())
    .select_from(shards)
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(*_IS_CLAIMABLE, _IS_SERVED)
)
# Rows that another claimer has locked are passed over: it gets them. The others are looked at again once locked.
_FREE = (
    sa.select(shards.c.shard_no)
    .join(batches, batches.c.id == shards.c.batch_id)
    .where(IS_NAMED, *_IS_CLAIMABLE, _IS_SERVED)
    .order_by(shards.c.shard_no)
    .with_for_update(of=shards, skip_locked=True)
    .cte("free")
)
_OF_A_LEASE = ("batch_id", "shard_no", "fence", "attempts", "forgiven", "requests", "model_version")
_CLAIM = (
    sa.update(shards)
    .where(shards.c.batch_id == sa.bindparam("batch"), shards.c.shard_no.in_(sa.select(_FREE.c.shard_no)))
    .values(
        state="leased",
        owner=sa.bindparam("worker"),
        fence=shards.c.fence + 1,
        attempts=shards.c.attempts + 1,
        lease_until=database_seconds() + sa.bindparam("ttl", type_=sa.Double),
        started_at=sa.func.coalesce(shards.c.started_at, database_instant()),
    )
    .returning(
        *(shards.c[name] for name in _OF_A_LEASE),
    )
)
_RENEW = sa.update(shards).where(IS_NAMED).values(lease_until=database_seconds() + sa.bindparam("ttl", type_=sa.Double))
_RELEASE = sa.update(shards).where(IS_NAMED).values(state="ready", attempts=shards.c.attempts - 1, lease_until=0)
_LIMITS = sa.select(shards.c.first_index, shards.c.last_index, OUTCOMES).where(
    shards.c.batch_id == sa.bindparam("batch"), shards.c.shard_no == sa.bindparam("number")
)
_FINISHED = sa.select(completions.c.index).where(in_range(completions))
_REQUESTS = sa.select(*PENDING_COLUMNS).where(in_range(requests)).order_by(requests.c.index)
