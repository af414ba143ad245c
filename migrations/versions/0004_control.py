"""Control: who paused what, orders to workers and what came of them, requests that only one version of a model may
answer, and who drew which tokens.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

PINNED = sa.text("model_version IS NOT NULL")
OPEN = sa.text("worker IS NOT NULL AND finished_at IS NULL")
OLD_COMMANDS = '"id", "kind", "worker", "batch_id", "index", "arguments", "created_at", "finished_at", "error"'
PINNED_TO = "The only version of a model that may answer {}; NULL takes any"
SPANS = "Who drew which tokens: objects with version, from_token, worker and attempt; NULL without a token"
GIVES_BACK = "The pause gives back what was running, instead of keeping its place"
PAUSED_BY = "Who paused it, as user@host"

# A row of before has no spans: all of its tokens are of one version, and of the worker that answered.
SPANS_SQLITE = """coalesce(c.version_spans, json_array(json_object(
    'version', c.model_version, 'from_token', 0, 'worker', c.worker, 'attempt', c.attempt)))"""
SPANS_POSTGRESQL = SPANS_SQLITE.replace("json_array(", "json_build_array(").replace(
    "json_object(", "json_build_object("
)
CHECKPOINT_SPANS = {
    "sqlite": "json_array(json_object('version', model_version, 'from_token', 0, 'worker', NULL, 'attempt', 0))",
    "postgresql": "json_build_array(json_build_object("
    "'version', model_version, 'from_token', 0, 'worker', NULL, 'attempt', 0))",
}


def upgrade() -> None:
    first = _revision("0001")
    _add_pauses_of_batches(first)
    _add_pins(first)
    _add_spans(first)
    op.add_column("workers", _with_default("serves", sa.JSON(), "'[]'", "Names of models that batches may ask it for"))
    _replace_commands(lambda: _create_commands(first))
    op.create_index("ix_commands_open", "commands", ["worker"], sqlite_where=OPEN, postgresql_where=OPEN)
    _create_worker_pauses(first)
    op.execute("DROP VIEW batch_progress")
    first._create_view(_batch_progress(first))
    first._create_view(_completion_versions(first))


def downgrade() -> None:
    first = _revision("0001")
    op.execute("DROP VIEW completion_versions")
    for view in reversed(first.VIEWS):  # SQLite drops no column of a table that a view reads
        op.execute(f"DROP VIEW {view.name}")
    op.drop_table("worker_pauses")
    op.execute("DELETE FROM commands WHERE kind <> 'cancel_request'")
    op.drop_index("ix_commands_open", "commands")
    _replace_commands(first._create_commands)
    op.drop_column("workers", "serves")
    for table in ("checkpoints", "past_completions", "completions"):
        op.drop_column(table, "version_spans")
    op.drop_column("checkpoints", "completion_tokens")
    op.drop_column("shards", "model_version")
    op.drop_index("ix_requests_pinned", "requests")
    op.drop_column("requests", "model_version")
    for name in ("pause_release", "pause_reason", "paused_by"):
        op.drop_column("batches", name)
    for view in (_revision("0003")._results(first), *first.VIEWS[1:]):
        first._create_view(view)


def _revision(number: str) -> Any:
    """Tables and views are written as there."""
    return context.script.get_revision(number).module


def _with_default(name: str, kind: Any, default: str, comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default=sa.text(default), comment=comment)


def _add_pauses_of_batches(first: Any) -> None:
    op.add_column("batches", first._optional("paused_by", sa.Text(), PAUSED_BY))
    op.add_column("batches", first._optional("pause_reason", sa.Text(), "Why it was paused"))
    release = sa.Column("pause_release", sa.Boolean(), nullable=False, server_default=sa.false(), comment=GIVES_BACK)
    op.add_column("batches", release)


def _add_pins(first: Any) -> None:
    op.add_column("requests", first._optional("model_version", sa.Text(), PINNED_TO.format("it")))
    op.create_index(
        "ix_requests_pinned",
        "requests",
        ["batch_id", "index", "model_version"],
        sqlite_where=PINNED,
        postgresql_where=PINNED,
    )
    op.add_column("shards", first._optional("model_version", sa.Text(), PINNED_TO.format("its requests")))


def _add_spans(first: Any) -> None:
    for table in ("completions", "past_completions", "checkpoints"):
        op.add_column(table, first._optional("version_spans", sa.JSON(), SPANS))
    op.add_column(
        "checkpoints", first._zero("completion_tokens", sa.Integer(), "Tokens so far: the length of the arrays")
    )
    op.execute("UPDATE checkpoints SET completion_tokens = json_array_length(token_ids)")
    spans = CHECKPOINT_SPANS[op.get_bind().dialect.name]
    op.execute(f"UPDATE checkpoints SET version_spans = {spans} WHERE model_version <> ''")


def _replace_commands(create: Any) -> None:
    """Made anew, because SQLite changes no comment: two kinds of orders have become pauses."""
    op.execute("CREATE TABLE commands_before AS SELECT * FROM commands")
    op.drop_table("commands")
    create()
    op.execute(f"INSERT INTO commands ({OLD_COMMANDS}) SELECT {OLD_COMMANDS} FROM commands_before")
    op.drop_table("commands_before")


def _create_commands(first: Any) -> None:
    required, optional = first._required, first._optional
    op.create_table(
        "commands",
        required("id", sa.Text(), "ULID; sorts by time of creation"),
        required("kind", sa.Text(), "update_model, drain or cancel_request"),
        optional("worker", sa.Text(), "Worker that is meant; NULL means whoever holds the request"),
        optional("batch_id", sa.Text(), "Batch of the request to cancel"),
        optional("index", sa.BigInteger(), "Request to cancel"),
        optional("arguments", sa.JSON(), "Further details"),
        required("created_at", first.INSTANT, "When it was given"),
        optional("finished_at", first.INSTANT, "When it was carried out, or given up"),
        optional("error", sa.Text(), "Why it could not be carried out"),
        optional("given_by", sa.Text(), "Who gave it, as user@host"),
        optional("started_at", first.INSTANT, "When its worker began with it"),
        optional("result", sa.JSON(), "What came of it, once it was carried out"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commands")),
        sa.UniqueConstraint("kind", "batch_id", "index", name=op.f("uq_commands_kind_batch_id_index")),
        comment="Orders to workers, which look for them every second or two",
    )


def _create_worker_pauses(first: Any) -> None:
    required, optional = first._required, first._optional
    op.create_table(
        "worker_pauses",
        required("worker", sa.Text(), "Name of the worker, registered or not; * means all"),
        required("paused_at", first.INSTANT, "When it was paused"),
        required("paused_by", sa.Text(), PAUSED_BY),
        optional("reason", sa.Text(), "Why it was paused"),
        required("release", sa.Boolean(), GIVES_BACK),
        sa.PrimaryKeyConstraint("worker", name=op.f("pk_worker_pauses")),
        comment="Workers that shall make no token until they are resumed; kept whatever is restarted",
    )


def _batch_progress(first: Any) -> Any:
    """The view of before, with who paused the batch and how far its unfinished answers are."""
    behind = {
        "paused_at": (
            first.Output("paused_by", PAUSED_BY, "b.paused_by"),
            first.Output("pause_reason", "Why it was paused", "b.pause_reason"),
            first.Output("pause_release", GIVES_BACK, "b.pause_release"),
        ),
        "completion_tokens": (
            first.Output(
                "tokens_in_progress",
                "Tokens of its unfinished answers, as far as they were stored",
                "(SELECT coalesce(sum(k.completion_tokens), 0) FROM checkpoints k WHERE k.batch_id = b.id)",
            ),
        ),
    }
    columns = (new for each in first.BATCH_PROGRESS.columns for new in (each, *behind.get(each.name, ())))
    return first.BATCH_PROGRESS._replace(columns=tuple(columns))


def _completion_versions(first: Any) -> Any:
    def of_span(name: str, kind: str = "") -> tuple[str, str]:
        text = f"t.value ->> '{name}'"
        return f"json_extract(t.value, '$.{name}')", f"CAST({text} AS {kind})" if kind else text

    begin_sqlite, begin_postgresql = of_span("from_token", "integer")
    next_sqlite = "json_extract(c.version_spans, '$[' || (t.key + 1) || '].from_token')"
    next_postgresql = "CAST(c.version_spans -> CAST(t.place AS integer) ->> 'from_token' AS integer)"
    end = "coalesce({}, c.completion_tokens) - {}"
    return first.View(
        "completion_versions",
        "One row a span of tokens that one version of a model drew, in one worker, at one attempt",
        (
            first.Output("batch_id", "The batch", "c.batch_id"),
            first.Output("index", "The request", 'c."index"'),
            first.Output("choice", "The choice", "c.choice"),
            first.Output(
                "span", "Place among the spans of the answer, from 0", "CAST(t.key AS INTEGER)", "t.place - 1"
            ),
            first.Output("version", "Version of the model, see model_versions", *of_span("version")),
            first.Output("worker", "Worker that drew these tokens", *of_span("worker")),
            first.Output("attempt", "Claim of the shard under which they were drawn", *of_span("attempt", "integer")),
            first.Output(
                "from_token", "Place of its first token in the answer, from 0", begin_sqlite, begin_postgresql
            ),
            first.Output(
                "tokens",
                "How many tokens",
                end.format(next_sqlite, begin_sqlite),
                end.format(next_postgresql, begin_postgresql),
            ),
        ),
        sqlite=f"FROM completions c JOIN json_each({SPANS_SQLITE}) t WHERE c.completion_tokens > 0",
        postgresql=f"""
FROM completions c
CROSS JOIN LATERAL json_array_elements({SPANS_POSTGRESQL}) WITH ORDINALITY AS t(value, place)
WHERE c.completion_tokens > 0
""",
    )
