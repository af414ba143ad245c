"""What makes delivery certain: attempts that are forgiven, failed answers that are kept, checkpoints of a known model.

A shard whose workers die is replaced by one shard a request. Requests keep the number of the shard that they were put
into, so the view `results` looks for the shard of a single request where that one is gone.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

SINGLE = sa.text("requests = 1")

# Only looked up where the shard of the first day is gone, and found by the index on single requests.
RUNS_ALONE = """EXISTS (
    SELECT 1 FROM shards x WHERE x.batch_id = r.batch_id AND x.first_index = r."index" AND x.requests = 1
    AND x.state = 'leased' AND {live})"""
STATE = """coalesce(w.status, CASE
    WHEN s.state = 'leased' AND {live} THEN 'running'
    WHEN s.shard_no IS NULL AND {alone} THEN 'running'
    ELSE 'queued' END)"""


def upgrade() -> None:
    first = _revision("0001")
    op.add_column("batches", _loaded_at(first))
    op.execute("UPDATE batches SET loaded_at = created_at")
    op.add_column(
        "shards", first._zero("forgiven", sa.Integer(), "Attempts before the last retry, which count no more")
    )
    op.create_index(
        "ix_shards_single", "shards", ["batch_id", "first_index"], sqlite_where=SINGLE, postgresql_where=SINGLE
    )
    op.add_column("checkpoints", _model_version())
    _store_checkpoints("EXTERNAL")
    _create_past_completions(first)
    _replace_results(first, _results(first))


def downgrade() -> None:
    first = _revision("0001")
    for view in reversed(first.VIEWS):  # SQLite drops no column of a table that a view reads
        op.execute(f"DROP VIEW {view.name}")
    op.drop_table("past_completions")
    _store_checkpoints("EXTENDED")
    op.drop_column("checkpoints", "model_version")
    op.drop_index("ix_shards_single", "shards")
    op.drop_column("shards", "forgiven")
    op.drop_column("batches", "loaded_at")
    for view in (_results_before(first), *first.VIEWS[1:]):
        first._create_view(view)


def _loaded_at(first: Any) -> sa.Column[Any]:
    # SQLite adds no column without a constant default. Whoever looks at it takes created_at where that is later.
    return sa.Column(
        "loaded_at",
        first.INSTANT,
        nullable=False,
        server_default=sa.text("'1970-01-01T00:00:00.000000Z'"),
        comment="When requests last arrived",
    )


def _model_version() -> sa.Column[Any]:
    return sa.Column(
        "model_version",
        sa.Text(),
        nullable=False,
        server_default=sa.text("''"),
        comment="Version of the model that got so far, see model_versions",
    )


def _store_checkpoints(storage: str) -> None:
    """PostgreSQL packs long values, which takes longer than all the rest and is for nothing in rows of some seconds."""
    if op.get_bind().dialect.name == "postgresql":
        for name in ("token_ids", "tokens", "logprobs", "top_logprobs", "token_times"):
            op.execute(f"ALTER TABLE checkpoints ALTER COLUMN {name} SET STORAGE {storage}")


def _create_past_completions(first: Any) -> None:
    required, optional = first._required, first._optional
    op.create_table(
        "past_completions",
        required("batch_id", sa.Text(), "The batch"),
        required("index", sa.BigInteger(), "The request"),
        required("choice", sa.Integer(), "0, and up to n - 1 where n > 1"),
        required("status", sa.Text(), "failed; a choice beside a failed one may have completed"),
        required("text", sa.Text(), "What there was of the answer; U+FFFD stands for NUL"),
        required("finish_reason", sa.Text(), "stop, length, cancelled or error"),
        optional("model", sa.Text(), "Model that answered"),
        optional("model_version", sa.Text(), "Its version, see model_versions"),
        required("prompt_tokens", sa.Integer(), "Length of the prompt"),
        required("completion_tokens", sa.Integer(), "Tokens generated: the length of the arrays"),
        required("cached_tokens", sa.Integer(), "Prompt tokens whose keys and values were already there"),
        required("token_ids", sa.JSON(), "Id of each token"),
        required("tokens", sa.JSON(), "Text of each token, or its bytes where they are not UTF-8"),
        required("logprobs", sa.JSON(), "Natural logarithm of the probability of each token"),
        optional("top_logprobs", sa.JSON(), "For each token the likeliest ones: [token_id, logprob, token]"),
        required("token_times", sa.JSON(), "Seconds from started_at to each token"),
        required("created_at", first.INSTANT, "When the submission of its batch began"),
        optional("started_at", first.INSTANT, "When a worker took the request up"),
        optional("first_token_at", first.INSTANT, "When the first token was there"),
        optional("finished_at", first.INSTANT, "When the request ended"),
        optional("worker", sa.Text(), "Worker that answered, see workers"),
        required("attempt", sa.Integer(), "Claim of the shard that led to the outcome"),
        optional("error", sa.JSON(), "Why the request failed: an object with code and message"),
        optional("prompt_logprobs", sa.JSON(), _revision("0002").COMMENT),
        required("retried_at", first.INSTANT, "When the request was set back to run again"),
        sa.PrimaryKeyConstraint("batch_id", "index", "choice", "attempt", name=op.f("pk_past_completions")),
        sa.ForeignKeyConstraint(
            ["batch_id", "index"], ["requests.batch_id", "requests.index"], name=op.f("fk_past_completions_requests")
        ),
        comment="One row a choice of a request that failed and was run again; moved here from completions",
    )


def _revision(number: str) -> Any:
    """Views are written as there."""
    return context.script.get_revision(number).module


def _results_before(first: Any) -> Any:
    """The view as revision 0002 leaves it."""
    second = _revision("0002")
    columns = (
        second._of_the_worst(each) if each.name in second.OF_THE_WORST else each for each in first.RESULTS.columns
    )
    tables = first.FROM_REQUESTS.rstrip() + second.WORST
    return first.RESULTS._replace(comment=second.ABOUT, columns=tuple(columns), sqlite=tables, postgresql=tables)


def _results(first: Any) -> Any:
    view = _results_before(first)
    state = {"sqlite": _state(first.LIVE_SQLITE), "postgresql": _state(first.LIVE_POSTGRESQL)}
    columns = (each._replace(**state) if each.name == "state" else each for each in view.columns)
    return view._replace(columns=tuple(columns))


def _state(live: str) -> str:
    return STATE.format(live=live, alone=RUNS_ALONE.format(live=live.replace("s.", "x.")))


def _replace_results(first: Any, view: Any) -> None:
    op.execute("DROP VIEW results")
    first._create_view(view)
