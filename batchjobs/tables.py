"""The SQL schema as SQLAlchemy sees it: tables with a comment on everything, and the columns of the views.

`migrations/` makes the same schema in a database, and `schema.check` compares the two. The text of the views is in the
migrations alone, because it differs between SQLite and PostgreSQL.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy import (
    JSON,
    TIMESTAMP,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    TableClause,
    Text,
    TextClause,
    TypeDecorator,
    UniqueConstraint,
    column,
    false,
    table,
    text,
)

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def instant_text(instant: datetime) -> str:
    """How SQLite keeps an instant: always 27 characters, so that the texts sort as the instants do."""
    text = orjson.dumps(instant, option=orjson.OPT_UTC_Z).decode()[1:-1]  # ten times as fast as isoformat
    if len(text) == 27 and text.endswith("Z"):
        return text
    return f"{instant.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


class Instant(TypeDecorator[datetime]):
    """An aware UTC instant: ``timestamptz`` on PostgreSQL, ISO 8601 text ending in Z on SQLite."""

    impl = TIMESTAMP(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else TIMESTAMP(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return instant_text(value) if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        instant: datetime = datetime.fromisoformat(value) if isinstance(value, str) else value
        return instant.astimezone(UTC)


def _counter(name: str, comment: str, kind: type[Integer] = Integer) -> Column[int]:
    return Column(name, kind, nullable=False, server_default=text("0"), comment=comment)


def _key_of_a_choice() -> list[Column[Any]]:
    return [
        Column("batch_id", Text, primary_key=True, comment="The batch"),
        Column("index", BigInteger, primary_key=True, autoincrement=False, comment="The request"),
        Column("choice", Integer, primary_key=True, autoincrement=False, comment="0, and up to n - 1 where n > 1"),
    ]


def _version_spans() -> Column[Any]:
    about = "Who drew which tokens: objects with version, from_token, worker and attempt; NULL without a token"
    return Column("version_spans", JSON, comment=about)


def _answer() -> list[Column[Any]]:
    """What there is of the answer, and who made it when."""
    return [
        Column("finish_reason", Text, nullable=False, comment="stop, length, cancelled or error"),
        Column("model", Text, comment="Model that answered"),
        Column("model_version", Text, comment="Its version, see model_versions"),
        Column("prompt_tokens", Integer, nullable=False, comment="Length of the prompt"),
        Column("completion_tokens", Integer, nullable=False, comment="Tokens generated: the length of the arrays"),
        Column(
            "cached_tokens", Integer, nullable=False, comment="Prompt tokens whose keys and values were already there"
        ),
        Column("token_ids", JSON, nullable=False, comment="Id of each token"),
        Column("tokens", JSON, nullable=False, comment="Text of each token, or its bytes where they are not UTF-8"),
        Column("logprobs", JSON, nullable=False, comment="Natural logarithm of the probability of each token"),
        Column("top_logprobs", JSON, comment="For each token the likeliest ones: [token_id, logprob, token]"),
        Column("token_times", JSON, nullable=False, comment="Seconds from started_at to each token"),
        Column("created_at", Instant, nullable=False, comment="When the submission of its batch began"),
        Column("started_at", Instant, comment="When a worker took the request up"),
        Column("first_token_at", Instant, comment="When the first token was there"),
        Column("finished_at", Instant, comment="When the request ended"),
        Column("worker", Text, comment="Worker that answered, see workers"),
    ]


def _error_and_scores() -> list[Column[Any]]:
    """What some requests alone have: an error, the scores of their prompts, tokens."""
    return [
        Column("error", JSON, comment="Why the request failed: an object with code and message"),
        Column(
            "prompt_logprobs",
            JSON,
            comment="With choice 0 where asked for: token_ids, tokens, logprobs and top_logprobs of the prompt",
        ),
        _version_spans(),
    ]


def _index_where(name: str, condition: TextClause, *columns: Column[Any], unique: bool = False) -> None:
    """A partial index, on both databases."""
    Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True, comment="ULID; sorts by time of creation"),
    Column("name", Text, comment="What the user calls the batch"),
    Column("key", Text, comment="Submission key: the same key with the same content is the same batch"),
    Column("fingerprint", Text, nullable=False, comment="Digest of the content, compared when a key is used again"),
    Column("model", Text, comment="Model that the batch asks for; NULL takes any worker"),
    Column("queue", Text, nullable=False, comment="Priority: high, default or low"),
    Column("shard_size", Integer, nullable=False, comment="Requests in a shard; the last one may hold fewer"),
    Column("source", Text, comment="Where the requests came from, for instance a file name"),
    Column("defaults", JSON, nullable=False, comment="Sampling fields given for the batch as a whole"),
    Column("created_at", Instant, nullable=False, comment="When the submission began"),
    Column("submitted_at", Instant, comment="When all requests were stored; NULL while they still arrive"),
    Column("paused_at", Instant, comment="When the batch was paused; NULL when it is not paused"),
    Column("cancel_requested_at", Instant, comment="When somebody asked for the cancellation"),
    Column(
        "loaded_at",
        Instant,
        nullable=False,
        server_default=text("'1970-01-01T00:00:00.000000Z'"),
        comment="When requests last arrived",
    ),
    Column("paused_by", Text, comment="Who paused it, as user@host"),
    Column("pause_reason", Text, comment="Why it was paused"),
    Column(
        "pause_release",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="The pause gives back what was running, instead of keeping its place",
    ),
    UniqueConstraint("key"),
    comment="One row a submission: a file, a stream or a list of requests",
)

requests = Table(
    "requests",
    metadata,
    Column("batch_id", Text, ForeignKey("batches.id"), primary_key=True, comment="The batch"),
    Column("index", BigInteger, primary_key=True, autoincrement=False, comment="Place in the batch, from 0"),
    Column("custom_id", Text, nullable=False, comment="The id of the user, once in a batch (refused lines apart)"),
    Column("endpoint", Text, nullable=False, comment="/v1/chat/completions or /v1/completions"),
    Column("body", JSON, nullable=False, comment="prompt or messages, and the sampling fields"),
    Column("shard_no", Integer, nullable=False, comment="The shard that the request was put into"),
    Column("rejected", Boolean, nullable=False, server_default=false(), comment="The line was refused and never runs"),
    Column("model_version", Text, comment="The only version of a model that may answer it; NULL takes any"),
    comment="One row an input line; inserted once, never changed",
)

# Refused lines stay out, so that the second use of a custom_id can be kept beside the first as a failed request.
_index_where(
    "uq_requests_batch_id_custom_id",
    text("NOT rejected"),
    requests.c.batch_id,
    requests.c.custom_id,
    unique=True,
)

# Whoever opens a batch finds those few, or none, without a look at the others.
_PINNED = text("model_version IS NOT NULL")
_index_where("ix_requests_pinned", _PINNED, requests.c.batch_id, requests.c.index, requests.c.model_version)

shards = Table(
    "shards",
    metadata,
    Column("batch_id", Text, ForeignKey("batches.id"), primary_key=True, comment="The batch"),
    Column("shard_no", Integer, primary_key=True, autoincrement=False, comment="Number in the batch, from 0"),
    Column("first_index", BigInteger, nullable=False, comment="Index of its first request"),
    Column("last_index", BigInteger, nullable=False, comment="Index of its last request, included"),
    Column("requests", Integer, nullable=False, comment="Number of its requests"),
    Column("state", Text, nullable=False, comment="ready, leased or done (every request has an outcome)"),
    _counter("fence", "Grows with every claim; only the newest may write", BigInteger),
    Column("owner", Text, comment="Worker that holds the lease, or the last one that did"),
    Column(
        "lease_until",
        Double,
        nullable=False,
        server_default=text("0"),
        comment="End of the lease in seconds since 1970 by the clock of the database",
    ),
    _counter("attempts", "Claims that were not given back cleanly"),
    _counter("completed", "Requests that ended with an answer"),
    _counter("failed", "Requests that ended with an error"),
    _counter("cancelled", "Requests that were cancelled"),
    _counter("expired", "Requests that ran out of time"),
    _counter("prompt_tokens", "Prompt tokens of its finished requests", BigInteger),
    _counter("completion_tokens", "Tokens generated for its finished requests", BigInteger),
    Column("started_at", Instant, comment="When a worker first claimed it"),
    Column("finished_at", Instant, comment="When its last outcome was stored"),
    _counter("forgiven", "Attempts before the last retry, which count no more"),
    Column("model_version", Text, comment="The only version of a model that may answer its requests; NULL takes any"),
    comment="One row a slice of a batch: the unit of the queue, with its lease and its counts",
)

_UNFINISHED = text("state <> 'done'")
_index_where("ix_shards_unfinished", _UNFINISHED, shards.c.batch_id, shards.c.shard_no)

# Where a shard was replaced by one shard a request, that of a request is found by its index.
_SINGLE = text("requests = 1")
_index_where("ix_shards_single", _SINGLE, shards.c.batch_id, shards.c.first_index)

completions = Table(
    "completions",
    metadata,
    *_key_of_a_choice(),
    Column("status", Text, nullable=False, comment="completed, failed, cancelled or expired"),
    Column("text", Text, nullable=False, comment="The answer; U+FFFD stands for NUL"),
    *_answer(),
    Column("attempt", Integer, nullable=False, comment="Claim of the shard that led to the outcome; 0: none did"),
    *_error_and_scores(),
    ForeignKeyConstraint(["batch_id", "index"], ["requests.batch_id", "requests.index"]),
    comment="One row a finished request and choice; inserted once, never changed",
)

_FAILED = text("status = 'failed'")
_index_where("ix_completions_failed", _FAILED, completions.c.batch_id, completions.c.index)

past_completions = Table(
    "past_completions",
    metadata,
    *_key_of_a_choice(),
    Column("status", Text, nullable=False, comment="failed; a choice beside a failed one may have completed"),
    Column("text", Text, nullable=False, comment="What there was of the answer; U+FFFD stands for NUL"),
    *_answer(),
    Column(
        "attempt",
        Integer,
        primary_key=True,
        autoincrement=False,
        comment="Claim of the shard that led to the outcome",
    ),
    *_error_and_scores(),
    Column("retried_at", Instant, nullable=False, comment="When the request was set back to run again"),
    ForeignKeyConstraint(["batch_id", "index"], ["requests.batch_id", "requests.index"]),
    comment="One row a choice of a request that failed and was run again; moved here from completions",
)

checkpoints = Table(
    "checkpoints",
    metadata,
    *_key_of_a_choice(),
    Column("fence", BigInteger, nullable=False, comment="Fence of the lease under which it was written"),
    Column("token_ids", JSON, nullable=False, comment="Id of each token so far"),
    Column("tokens", JSON, nullable=False, comment="Text of each token so far"),
    Column("logprobs", JSON, nullable=False, comment="Natural logarithm of the probability of each token so far"),
    Column("top_logprobs", JSON, comment="For each token so far the likeliest ones"),
    Column("token_times", JSON, nullable=False, comment="Seconds from started_at to each token so far"),
    Column("started_at", Instant, nullable=False, comment="When a worker first took the request up"),
    Column("updated_at", Instant, nullable=False, comment="When this row was written"),
    Column(
        "model_version",
        Text,
        nullable=False,
        server_default=text("''"),
        comment="Version of the model that got so far, see model_versions",
    ),
    _version_spans(),
    _counter("completion_tokens", "Tokens so far: the length of the arrays"),
    ForeignKeyConstraint(["batch_id", "index"], ["requests.batch_id", "requests.index"]),
    comment="Progress of unfinished requests, from which another worker can go on",
)

workers = Table(
    "workers",
    metadata,
    Column("name", Text, primary_key=True, comment="Name of the worker, unique at any time"),
    Column("host", Text, nullable=False, comment="Host that it runs on"),
    Column("pid", Integer, nullable=False, comment="Its process id there"),
    Column("device", Text, nullable=False, comment="Where the model is: cpu, cuda:0"),
    Column("dtype", Text, nullable=False, comment="Number format of the weights"),
    Column("model", Text, nullable=False, comment="Model that it serves"),
    Column("model_version", Text, nullable=False, comment="Version of the model, see model_versions"),
    Column("state", Text, nullable=False, comment="What it does now, or how it ended"),
    _counter("running", "Requests that get tokens now"),
    _counter("waiting", "Requests that it holds and has not begun"),
    Column("kv_usage_ratio", Double, nullable=False, server_default=text("0"), comment="Share of the KV cache in use"),
    Column("tokens_per_second", Double, nullable=False, server_default=text("0"), comment="Recent speed of generation"),
    _counter("prompt_tokens", "Prompt tokens computed since its start", BigInteger),
    _counter("generated_tokens", "Tokens generated since its start", BigInteger),
    _counter("preemptions", "Requests set back for want of memory since its start", BigInteger),
    Column("started_at", Instant, nullable=False, comment="When it started"),
    Column(
        "heartbeat_at",
        Double,
        nullable=False,
        comment="Last sign of life in seconds since 1970 by the clock of the database",
    ),
    Column("stopped_at", Instant, comment="When it ended in good order; NULL while it lives or after a crash"),
    Column(
        "serves",
        JSON,
        nullable=False,
        server_default=text("'[]'"),
        comment="Names of models that batches may ask it for",
    ),
    comment="One row a worker, living or gone",
)

commands = Table(
    "commands",
    metadata,
    Column("id", Text, primary_key=True, comment="ULID; sorts by time of creation"),
    Column("kind", Text, nullable=False, comment="update_model, drain or cancel_request"),
    Column("worker", Text, comment="Worker that is meant; NULL means whoever holds the request"),
    Column("batch_id", Text, comment="Batch of the request to cancel"),
    Column("index", BigInteger, comment="Request to cancel"),
    Column("arguments", JSON, comment="Further details"),
    Column("created_at", Instant, nullable=False, comment="When it was given"),
    Column("finished_at", Instant, comment="When it was carried out, or given up"),
    Column("error", Text, comment="Why it could not be carried out"),
    Column("given_by", Text, comment="Who gave it, as user@host"),
    Column("started_at", Instant, comment="When its worker began with it"),
    Column("result", JSON, comment="What came of it, once it was carried out"),
    UniqueConstraint("kind", "batch_id", "index"),
    comment="Orders to workers, which look for them every second or two",
)

_OPEN = text("worker IS NOT NULL AND finished_at IS NULL")
_index_where("ix_commands_open", _OPEN, commands.c.worker)

worker_pauses = Table(
    "worker_pauses",
    metadata,
    Column("worker", Text, primary_key=True, comment="Name of the worker, registered or not; * means all"),
    Column("paused_at", Instant, nullable=False, comment="When it was paused"),
    Column("paused_by", Text, nullable=False, comment="Who paused it, as user@host"),
    Column("reason", Text, comment="Why it was paused"),
    Column(
        "release",
        Boolean,
        nullable=False,
        comment="The pause gives back what was running, instead of keeping its place",
    ),
    comment="Workers that shall make no token until they are resumed; kept whatever is restarted",
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("version", Text, primary_key=True, comment="Digest that tells two sets of weights apart"),
    Column("name", Text, nullable=False, comment="Name that the model goes by"),
    Column("source", Text, nullable=False, comment="Directory, file or hub id that it was loaded from"),
    Column("dtype", Text, nullable=False, comment="Number format of the weights"),
    Column("details", JSON, nullable=False, comment="Revision, size and what else is known"),
    Column("created_at", Instant, nullable=False, comment="When a worker first loaded it"),
    comment="One row a model that has answered here",
)


def _view(
    name: str, texts: str, integers: str = "", doubles: str = "", instants: str = "", booleans: str = ""
) -> TableClause:
    kinds: list[tuple[str, TypeEngine[Any]]] = [
        (texts, Text()),
        (integers, BigInteger()),
        (doubles, Double()),
        (instants, Instant()),
        (booleans, Boolean()),
    ]
    return table(name, *(column(each, kind) for names, kind in kinds for each in names.split()))


results = _view(
    "results",
    texts="batch_id custom_id state endpoint prompt text finish_reason error_code error_message"
    " model model_version worker",
    integers="index attempt prompt_tokens completion_tokens cached_tokens",
    doubles="first_token_seconds duration_seconds",
    instants="created_at started_at first_token_at finished_at",
)
completion_tokens = _view(
    "completion_tokens",
    texts="batch_id token",
    integers="index choice position token_id",
    doubles="logprob at_seconds",
)
batch_progress = _view(
    "batch_progress",
    texts="batch_id name key model queue status paused_by pause_reason",
    integers="total queued running completed failed cancelled expired prompt_tokens completion_tokens"
    " tokens_in_progress shard_size shards shards_ready shards_leased shards_done",
    instants="created_at submitted_at paused_at cancel_requested_at started_at finished_at",
    booleans="pause_release",
)
completion_versions = _view(
    "completion_versions",
    texts="batch_id version worker",
    integers="index choice span attempt from_token tokens",
)
VIEWS = (results, completion_tokens, batch_progress, completion_versions)
