"""The first tables and views.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

INSTANT = sa.TIMESTAMP(timezone=True).with_variant(sa.Text(), "sqlite")


TABLES = ("batches", "requests", "shards", "completions", "checkpoints", "workers", "commands", "model_versions")


def _required(name: str, kind: Any, comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment)


def _optional(name: str, kind: Any, comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=True, comment=comment)


def _zero(name: str, kind: Any, comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default=sa.text("0"), comment=comment)


def upgrade() -> None:
    _create_batches()
    _create_requests()
    _create_shards()
    _create_completions()
    _create_checkpoints()
    _create_workers()
    _create_commands()
    _create_model_versions()
    for view in VIEWS:
        _create_view(view)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("COMMENT ON TABLE alembic_version IS 'The revision of these tables'")
        op.execute("COMMENT ON COLUMN alembic_version.version_num IS 'Number of the newest migration that was run'")


def downgrade() -> None:
    for view in reversed(VIEWS):
        op.execute(f"DROP VIEW {view.name}")
    for table in (
        "model_versions",
        "commands",
        "workers",
        "checkpoints",
        "completions",
        "shards",
        "requests",
        "batches",
    ):
        op.drop_table(table)


def _create_batches() -> None:
    op.create_table(
        "batches",
        _required("id", sa.Text(), "ULID; sorts by time of creation"),
        _optional("name", sa.Text(), "What the user calls the batch"),
        _optional("key", sa.Text(), "Submission key: the same key with the same content is the same batch"),
        _required("fingerprint", sa.Text(), "Digest of the content, compared when a key is used again"),
        _optional("model", sa.Text(), "Model that the batch asks for; NULL takes any worker"),
        _required("queue", sa.Text(), "Priority: high, default or low"),
        _required("shard_size", sa.Integer(), "Requests in a shard; the last one may hold fewer"),
        _optional("source", sa.Text(), "Where the requests came from, for instance a file name"),
        _required("defaults", sa.JSON(), "Sampling fields given for the batch as a whole"),
        _required("created_at", INSTANT, "When the submission began"),
        _optional("submitted_at", INSTANT, "When all requests were stored; NULL while they still arrive"),
        _optional("paused_at", INSTANT, "When the batch was paused; NULL when it is not paused"),
        _optional("cancel_requested_at", INSTANT, "When somebody asked for the cancellation"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
        sa.UniqueConstraint("key", name=op.f("uq_batches_key")),
        comment="One row a submission: a file, a stream or a list of requests",
    )


def _create_requests() -> None:
    op.create_table(
        "requests",
        _required("batch_id", sa.Text(), "The batch"),
        _required("index", sa.BigInteger(), "Place in the batch, from 0"),
        _required("custom_id", sa.Text(), "The id of the user, once in a batch (refused lines apart)"),
        _required("endpoint", sa.Text(), "/v1/chat/completions or /v1/completions"),
        _required("body", sa.JSON(), "prompt or messages, and the sampling fields"),
        _required("shard_no", sa.Integer(), "The shard that the request was put into"),
        sa.Column(
            "rejected",
            sa.Boolean(),
            nullable=False,
            server_default=sa.false(),
            comment="The line was refused and never runs",
        ),
        sa.PrimaryKeyConstraint("batch_id", "index", name=op.f("pk_requests")),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_requests_batches")),
        comment="One row an input line; inserted once, never changed",
    )
    accepted = sa.text("NOT rejected")
    op.create_index(
        "uq_requests_batch_id_custom_id",
        "requests",
        ["batch_id", "custom_id"],
        unique=True,
        sqlite_where=accepted,
        postgresql_where=accepted,
    )


def _create_shards() -> None:
    op.create_table(
        "shards",
        _required("batch_id", sa.Text(), "The batch"),
        _required("shard_no", sa.Integer(), "Number in the batch, from 0"),
        _required("first_index", sa.BigInteger(), "Index of its first request"),
        _required("last_index", sa.BigInteger(), "Index of its last request, included"),
        _required("requests", sa.Integer(), "Number of its requests"),
        _required("state", sa.Text(), "ready, leased or done (every request has an outcome)"),
        _zero("fence", sa.BigInteger(), "Grows with every claim; only the newest may write"),
        _optional("owner", sa.Text(), "Worker that holds the lease, or the last one that did"),
        _zero("lease_until", sa.Double(), "End of the lease in seconds since 1970 by the clock of the database"),
        _zero("attempts", sa.Integer(), "Claims that were not given back cleanly"),
        _zero("completed", sa.Integer(), "Requests that ended with an answer"),
        _zero("failed", sa.Integer(), "Requests that ended with an error"),
        _zero("cancelled", sa.Integer(), "Requests that were cancelled"),
        _zero("expired", sa.Integer(), "Requests that ran out of time"),
        _zero("prompt_tokens", sa.BigInteger(), "Prompt tokens of its finished requests"),
        _zero("completion_tokens", sa.BigInteger(), "Tokens generated for its finished requests"),
        _optional("started_at", INSTANT, "When a worker first claimed it"),
        _optional("finished_at", INSTANT, "When its last outcome was stored"),
        sa.PrimaryKeyConstraint("batch_id", "shard_no", name=op.f("pk_shards")),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_shards_batches")),
        comment="One row a slice of a batch: the unit of the queue, with its lease and its counts",
    )
    unfinished = sa.text("state <> 'done'")
    op.create_index(
        "ix_shards_unfinished",
        "shards",
        ["batch_id", "shard_no"],
        sqlite_where=unfinished,
        postgresql_where=unfinished,
    )


def _create_completions() -> None:
    op.create_table(
        "completions",
        _required("batch_id", sa.Text(), "The batch"),
        _required("index", sa.BigInteger(), "The request"),
        _required("choice", sa.Integer(), "0, and up to n - 1 where n > 1"),
        _required("status", sa.Text(), "completed, failed, cancelled or expired"),
        _required("text", sa.Text(), "The answer; U+FFFD stands for NUL"),
        _required("finish_reason", sa.Text(), "stop, length, cancelled or error"),
        _optional("model", sa.Text(), "Model that answered"),
        _optional("model_version", sa.Text(), "Its version, see model_versions"),
        _required("prompt_tokens", sa.Integer(), "Length of the prompt"),
        _required("completion_tokens", sa.Integer(), "Tokens generated: the length of the arrays"),
        _required("cached_tokens", sa.Integer(), "Prompt tokens whose keys and values were already there"),
        _required("token_ids", sa.JSON(), "Id of each token"),
        _required("tokens", sa.JSON(), "Text of each token, or its bytes where they are not UTF-8"),
        _required("logprobs", sa.JSON(), "Natural logarithm of the probability of each token"),
        _optional("top_logprobs", sa.JSON(), "For each token the likeliest ones: [token_id, logprob, token]"),
        _required("token_times", sa.JSON(), "Seconds from started_at to each token"),
        _required("created_at", INSTANT, "When the submission of its batch began"),
        _optional("started_at", INSTANT, "When a worker took the request up"),
        _optional("first_token_at", INSTANT, "When the first token was there"),
        _optional("finished_at", INSTANT, "When the request ended"),
        _optional("worker", sa.Text(), "Worker that answered, see workers"),
        _required("attempt", sa.Integer(), "Claim of the shard that led to the outcome; 0: none did"),
        _optional("error", sa.JSON(), "Why the request failed: an object with code and message"),
        sa.PrimaryKeyConstraint("batch_id", "index", "choice", name=op.f("pk_completions")),
        sa.ForeignKeyConstraint(
            ["batch_id", "index"], ["requests.batch_id", "requests.index"], name=op.f("fk_completions_requests")
        ),
        comment="One row a finished request and choice; inserted once, never changed",
    )
    failed = sa.text("status = 'failed'")
    op.create_index(
        "ix_completions_failed", "completions", ["batch_id", "index"], sqlite_where=failed, postgresql_where=failed
    )


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        _required("batch_id", sa.Text(), "The batch"),
        _required("index", sa.BigInteger(), "The request"),
        _required("choice", sa.Integer(), "0, and up to n - 1 where n > 1"),
        _required("fence", sa.BigInteger(), "Fence of the lease under which it was written"),
        _required("token_ids", sa.JSON(), "Id of each token so far"),
        _required("tokens", sa.JSON(), "Text of each token so far"),
        _required("logprobs", sa.JSON(), "Natural logarithm of the probability of each token so far"),
        _optional("top_logprobs", sa.JSON(), "For each token so far the likeliest ones"),
        _required("token_times", sa.JSON(), "Seconds from started_at to each token so far"),
        _required("started_at", INSTANT, "When a worker first took the request up"),
        _required("updated_at", INSTANT, "When this row was written"),
        sa.PrimaryKeyConstraint("batch_id", "index", "choice", name=op.f("pk_checkpoints")),
        sa.ForeignKeyConstraint(
            ["batch_id", "index"], ["requests.batch_id", "requests.index"], name=op.f("fk_checkpoints_requests")
        ),
        comment="Progress of unfinished requests, from which another worker can go on",
    )


def _create_workers() -> None:
    op.create_table(
        "workers",
        _required("name", sa.Text(), "Name of the worker, unique at any time"),
        _required("host", sa.Text(), "Host that it runs on"),
        _required("pid", sa.Integer(), "Its process id there"),
        _required("device", sa.Text(), "Where the model is: cpu, cuda:0"),
        _required("dtype", sa.Text(), "Number format of the weights"),
        _required("model", sa.Text(), "Model that it serves"),
        _required("model_version", sa.Text(), "Version of the model, see model_versions"),
        _required("state", sa.Text(), "What it does now, or how it ended"),
        _zero("running", sa.Integer(), "Requests that get tokens now"),
        _zero("waiting", sa.Integer(), "Requests that it holds and has not begun"),
        _zero("kv_usage_ratio", sa.Double(), "Share of the KV cache in use"),
        _zero("tokens_per_second", sa.Double(), "Recent speed of generation"),
        _zero("prompt_tokens", sa.BigInteger(), "Prompt tokens computed since its start"),
        _zero("generated_tokens", sa.BigInteger(), "Tokens generated since its start"),
        _zero("preemptions", sa.BigInteger(), "Requests set back for want of memory since its start"),
        _required("started_at", INSTANT, "When it started"),
        _required("heartbeat_at", sa.Double(), "Last sign of life in seconds since 1970 by the clock of the database"),
        _optional("stopped_at", INSTANT, "When it ended in good order; NULL while it lives or after a crash"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_workers")),
        comment="One row a worker, living or gone",
    )


def _create_commands() -> None:
    op.create_table(
        "commands",
        _required("id", sa.Text(), "ULID; sorts by time of creation"),
        _required("kind", sa.Text(), "pause, resume, update_model, drain or cancel_request"),
        _optional("worker", sa.Text(), "Worker that is meant; NULL means all"),
        _optional("batch_id", sa.Text(), "Batch of the request to cancel"),
        _optional("index", sa.BigInteger(), "Request to cancel"),
        _optional("arguments", sa.JSON(), "Further details"),
        _required("created_at", INSTANT, "When it was given"),
        _optional("finished_at", INSTANT, "When it was carried out"),
        _optional("error", sa.Text(), "Why it could not be carried out"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commands")),
        sa.UniqueConstraint("kind", "batch_id", "index", name=op.f("uq_commands_kind_batch_id_index")),
        comment="Orders to workers, which look for them every second or two",
    )


def _create_model_versions() -> None:
    op.create_table(
        "model_versions",
        _required("version", sa.Text(), "Digest that tells two sets of weights apart"),
        _required("name", sa.Text(), "Name that the model goes by"),
        _required("source", sa.Text(), "Directory, file or hub id that it was loaded from"),
        _required("dtype", sa.Text(), "Number format of the weights"),
        _required("details", sa.JSON(), "Revision, size and what else is known"),
        _required("created_at", INSTANT, "When a worker first loaded it"),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_model_versions")),
        comment="One row a model that has answered here",
    )


class Output(NamedTuple):
    """One column of a view. ``postgresql`` is None where the expression for SQLite serves both."""

    name: str
    comment: str
    sqlite: str
    postgresql: str | None = None

    def expression(self, dialect: str) -> str:
        return self.postgresql if dialect == "postgresql" and self.postgresql else self.sqlite


class View(NamedTuple):
    name: str
    comment: str
    columns: tuple[Output, ...]
    sqlite: str
    postgresql: str

    def statement(self, dialect: str) -> str:
        """SQLite keeps the text as it is, comments included."""
        columns = ",\n  ".join(f'{c.expression(dialect)} AS "{c.name}" /* {c.comment} */' for c in self.columns)
        rest = self.postgresql if dialect == "postgresql" else self.sqlite
        return f"CREATE VIEW {self.name} AS /* {self.comment} */ SELECT\n  {columns}\n{rest.strip()}"


def _create_view(view: View) -> None:
    dialect = op.get_bind().dialect.name
    _execute(view.statement(dialect))
    if dialect == "postgresql":
        _execute(f"COMMENT ON VIEW {view.name} IS '{view.comment}'")
        for column in view.columns:
            _execute(f"COMMENT ON COLUMN {view.name}.\"{column.name}\" IS '{column.comment}'")


def _execute(statement: str) -> None:
    op.get_bind().exec_driver_sql(statement)  # as it stands: no bind parameters, no colons to escape


LIVE_SQLITE = "s.lease_until > (julianday('now') - 2440587.5) * 86400.0"
LIVE_POSTGRESQL = "s.lease_until > extract(epoch FROM clock_timestamp())"

STATE = "coalesce(c.status, CASE WHEN s.state = 'leased' AND {live} THEN 'running' ELSE 'queued' END)"

# PostgreSQL cannot turn the JSON escape of NUL into text, so both databases show U+FFFD for it. The detour over U+0001,
# which never stands unescaped in JSON, leaves an escaped backslash before u0000 alone.
READABLE = r"replace(replace(replace({body}, '\\', {mark}), '\u0000', '\ufffd'), {mark}, '\\')"
BODY_SQLITE = READABLE.format(body="r.body", mark="char(1)")
BODY_POSTGRESQL = READABLE.format(body="r.body::text", mark="chr(1)")


def _seconds(name: str, comment: str, end: str) -> Output:
    return Output(
        name,
        comment,
        f"(julianday({end}) - julianday(c.started_at)) * 86400.0",
        f"CAST(extract(epoch FROM {end} - c.started_at) AS double precision)",
    )


FROM_REQUESTS = """
FROM requests r
JOIN batches b ON b.id = r.batch_id
LEFT JOIN shards s ON s.batch_id = r.batch_id AND s.shard_no = r.shard_no
LEFT JOIN completions c ON c.batch_id = r.batch_id AND c."index" = r."index" AND c.choice = 0
"""

RESULTS = View(
    "results",
    "One row a request: what was asked, where it is, what came out (of the first choice where n > 1)",
    (
        Output("batch_id", "The batch", "r.batch_id"),
        Output("index", "Place in the batch, from 0", 'r."index"'),
        Output("custom_id", "The id of the user", "r.custom_id"),
        Output(
            "state",
            "queued, running, completed, failed, cancelled or expired",
            STATE.format(live=LIVE_SQLITE),
            STATE.format(live=LIVE_POSTGRESQL),
        ),
        Output("endpoint", "/v1/chat/completions or /v1/completions", "r.endpoint"),
        Output(
            "prompt",
            "The prompt, or the messages or token ids as JSON; U+FFFD stands for NUL",
            f"coalesce(json_extract({BODY_SQLITE}, '$.prompt'), json_extract({BODY_SQLITE}, '$.messages'))",
            f"coalesce(({BODY_POSTGRESQL})::json ->> 'prompt', ({BODY_POSTGRESQL})::json ->> 'messages')",
        ),
        Output("text", "The answer", "c.text"),
        Output("finish_reason", "stop, length, cancelled or error", "c.finish_reason"),
        Output("error_code", "Why it failed, for programs", "json_extract(c.error, '$.code')", "c.error ->> 'code'"),
        Output(
            "error_message", "Why it failed, for people", "json_extract(c.error, '$.message')", "c.error ->> 'message'"
        ),
        Output("model", "Model that answered", "c.model"),
        Output("model_version", "Its version, see model_versions", "c.model_version"),
        Output("prompt_tokens", "Length of the prompt", "c.prompt_tokens"),
        Output("completion_tokens", "Tokens generated", "c.completion_tokens"),
        Output("cached_tokens", "Prompt tokens whose keys and values were already there", "c.cached_tokens"),
        Output("worker", "Worker that answered", "c.worker"),
        Output("attempt", "Claim of the shard that led to the outcome", "c.attempt"),
        Output("created_at", "When the submission of its batch began", "b.created_at"),
        Output("started_at", "When a worker took the request up", "c.started_at"),
        Output("first_token_at", "When the first token was there", "c.first_token_at"),
        Output("finished_at", "When the request ended", "c.finished_at"),
        _seconds("first_token_seconds", "From started_at to first_token_at", "c.first_token_at"),
        _seconds("duration_seconds", "From started_at to finished_at", "c.finished_at"),
    ),
    sqlite=FROM_REQUESTS,
    postgresql=FROM_REQUESTS,
)

COMPLETION_TOKENS = View(
    "completion_tokens",
    "One row a generated token",
    (
        Output("batch_id", "The batch", "c.batch_id"),
        Output("index", "The request", 'c."index"'),
        Output("choice", "The choice", "c.choice"),
        Output("position", "Place in the answer, from 0", "CAST(t.key AS INTEGER)", "t.position - 1"),
        Output("token_id", "Id of the token", "t.value", "t.token_id::bigint"),
        Output(
            "token",
            "Its text, or its bytes as JSON where they are not UTF-8",
            "json_extract(c.tokens, '$[' || t.key || ']')",
            "t.token",
        ),
        Output(
            "logprob",
            "Natural logarithm of its probability",
            "json_extract(c.logprobs, '$[' || t.key || ']')",
            "t.logprob::double precision",
        ),
        Output(
            "at_seconds",
            "Seconds from started_at to the token",
            "json_extract(c.token_times, '$[' || t.key || ']')",
            "t.at_seconds::double precision",
        ),
    ),
    sqlite="FROM completions c JOIN json_each(c.token_ids) t",
    postgresql="""
FROM completions c
CROSS JOIN LATERAL ROWS FROM (
  json_array_elements_text(c.token_ids),
  json_array_elements_text(c.tokens),
  json_array_elements_text(c.logprobs),
  json_array_elements_text(c.token_times)
) WITH ORDINALITY AS t(token_id, token, logprob, at_seconds, position)
""",
)

FROM_BATCHES = "FROM batches b LEFT JOIN shards s ON s.batch_id = b.id GROUP BY b.id"
DONE = "s.completed + s.failed + s.cancelled + s.expired"


def _sum(expression: str) -> str:
    return f"coalesce(sum({expression}), 0)"


def _total(bigint: str) -> str:
    return f"CAST({_sum(bigint)} AS bigint)"  # PostgreSQL sums bigint to numeric


def _if_live(then: str, otherwise: str, live: str) -> str:
    return f"CASE WHEN s.state = 'leased' AND {live} THEN {then} ELSE {otherwise} END"


# While requests still arrive there are no shards to sum over; refused lines are completions by then.
LOADED = "CASE WHEN b.submitted_at IS NULL THEN (SELECT count(*) FROM {table} x WHERE x.batch_id = b.id) ELSE 0 END"
STORED = LOADED.format(table="requests")
REFUSED = LOADED.format(table="completions")


def _queued(live: str) -> str:
    return f"{_sum(_if_live('0', f's.requests - ({DONE})', live))} + {STORED} - {REFUSED}"


def _running(live: str) -> str:
    return _sum(_if_live(f"s.requests - ({DONE})", "0", live))


BATCH_PROGRESS = View(
    "batch_progress",
    "One row a batch: its status, its counts and its times, summed over its shards",
    (
        Output("batch_id", "The batch", "b.id"),
        Output("name", "What the user calls the batch", "b.name"),
        Output("key", "Submission key", "b.key"),
        Output("model", "Model that the batch asks for", "b.model"),
        Output("queue", "Priority: high, default or low", "b.queue"),
        Output("shard_size", "Requests in a shard", "b.shard_size"),
        Output(
            "status",
            "loading, queued, running, completed, cancelling or cancelled",
            f"""CASE
    WHEN b.submitted_at IS NULL THEN 'loading'
    WHEN {_sum("s.requests")} = {_sum(DONE)} THEN
      CASE WHEN b.cancel_requested_at IS NOT NULL AND {_sum("s.cancelled")} > 0 THEN 'cancelled' ELSE 'completed' END
    WHEN b.cancel_requested_at IS NOT NULL THEN 'cancelling'
    WHEN min(s.started_at) IS NULL THEN 'queued'
    ELSE 'running'
  END""",
        ),
        Output("total", "Requests", f"{_sum('s.requests')} + {STORED}"),
        Output("queued", "Requests that wait", _queued(LIVE_SQLITE), _queued(LIVE_POSTGRESQL)),
        Output("running", "Requests that a worker holds", _running(LIVE_SQLITE), _running(LIVE_POSTGRESQL)),
        Output("completed", "Requests that ended with an answer", _sum("s.completed")),
        Output("failed", "Requests that ended with an error", f"{_sum('s.failed')} + {REFUSED}"),
        Output("cancelled", "Requests that were cancelled", _sum("s.cancelled")),
        Output("expired", "Requests that ran out of time", _sum("s.expired")),
        Output("prompt_tokens", "Prompt tokens of the finished requests", _total("s.prompt_tokens")),
        Output("completion_tokens", "Tokens generated for the finished requests", _total("s.completion_tokens")),
        Output("shards", "Shards", "count(s.shard_no)"),
        Output("shards_ready", "Shards that wait", "count(CASE WHEN s.state = 'ready' THEN 1 END)"),
        Output("shards_leased", "Shards that a worker took", "count(CASE WHEN s.state = 'leased' THEN 1 END)"),
        Output("shards_done", "Shards with all their outcomes", "count(CASE WHEN s.state = 'done' THEN 1 END)"),
        Output("created_at", "When the submission began", "b.created_at"),
        Output("submitted_at", "When all requests were stored", "b.submitted_at"),
        Output("paused_at", "When the batch was paused; NULL when it is not paused", "b.paused_at"),
        Output("cancel_requested_at", "When somebody asked for the cancellation", "b.cancel_requested_at"),
        Output("started_at", "When a worker first took something up", "min(s.started_at)"),
        Output(
            "finished_at",
            "When the last outcome was stored; NULL before",
            f"CASE WHEN b.submitted_at IS NOT NULL AND {_sum('s.requests')} = {_sum(DONE)}"
            " THEN coalesce(max(s.finished_at), b.submitted_at) END",
        ),
    ),
    sqlite=FROM_BATCHES,
    postgresql=FROM_BATCHES,
)

VIEWS = (RESULTS, COMPLETION_TOKENS, BATCH_PROGRESS)
