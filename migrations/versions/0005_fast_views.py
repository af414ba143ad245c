"""Views that stay fast: `results` on PostgreSQL, whatever the planner knows, and `completion_tokens` on SQLite.

- On PostgreSQL a function that may change within a statement kept `results` from being merged into the query around
  it: every column of every request was made, even for ten rows. And with old statistics the planner joined requests and
  completions each with each. Now each request looks its completion up by the key.
- What gives a request its state is looked up where the state is asked for, and its shard only before the end.
- On SQLite the tokens of an answer are unrolled along `logprobs`, for most questions look at nothing else, and every
  other value costs a walk along its array.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from typing import Any

from alembic import context, op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

LIVE = {
    "sqlite": "x.lease_until > (julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "x.lease_until > extract(epoch FROM statement_timestamp())",
}

# Of the choice to which the request owes its state.
WORST = """(
    SELECT x.{column} FROM completions x
    WHERE x.batch_id = r.batch_id AND x."index" = r."index"
    ORDER BY CASE x.status WHEN 'cancelled' THEN 0 WHEN 'expired' THEN 1 WHEN 'failed' THEN 2 ELSE 3 END, x.choice
    LIMIT 1)"""

# The index on single requests is only used where the shard of the first day is gone.
STATE = """coalesce({worst}, CASE
    WHEN EXISTS (
      SELECT 1 FROM shards x WHERE x.batch_id = r.batch_id AND x.shard_no = r.shard_no
      AND x.state = 'leased' AND {live}) THEN 'running'
    WHEN NOT EXISTS (SELECT 1 FROM shards x WHERE x.batch_id = r.batch_id AND x.shard_no = r.shard_no)
      AND EXISTS (
        SELECT 1 FROM shards x WHERE x.batch_id = r.batch_id AND x.first_index = r."index" AND x.requests = 1
        AND x.state = 'leased' AND {live}) THEN 'running'
    ELSE 'queued' END)"""

FIRST_CHOICE = """FROM requests r
JOIN batches b ON b.id = r.batch_id
LEFT JOIN {completions}"""
BY_KEY = """x.batch_id = r.batch_id AND x."index" = r."index" AND x.choice = 0"""
# The limit keeps the planner from any other way than the key.
LOOKED_UP = f"""LATERAL (
  SELECT x.text, x.finish_reason, x.model, x.model_version, x.prompt_tokens, x.completion_tokens, x.cached_tokens,
    x.worker, x.attempt, x.started_at, x.first_token_at, x.finished_at
  FROM completions x WHERE {BY_KEY} LIMIT 1
) c ON true"""


def upgrade() -> None:
    first = _revision("0001")
    _replace(first, _results())
    if op.get_bind().dialect.name == "sqlite":
        _replace(first, _completion_tokens(first))


def downgrade() -> None:
    first = _revision("0001")
    _replace(first, _revision("0003")._results(first))
    if op.get_bind().dialect.name == "sqlite":
        _replace(first, first.COMPLETION_TOKENS)


def _revision(number: str) -> Any:
    """Views are written as there."""
    return context.script.get_revision(number).module


def _replace(first: Any, view: Any) -> None:
    op.execute(f"DROP VIEW {view.name}")
    first._create_view(view)


def _results() -> Any:
    """The view of before, with other ways to the same values."""
    before = _revision("0003")._results(_revision("0001"))
    error = WORST.format(column="error")
    changed = {
        "state": {name: STATE.format(worst=WORST.format(column="status"), live=live) for name, live in LIVE.items()},
        "error_code": {"sqlite": f"json_extract({error}, '$.code')", "postgresql": f"{error} ->> 'code'"},
        "error_message": {"sqlite": f"json_extract({error}, '$.message')", "postgresql": f"{error} ->> 'message'"},
    }
    return before._replace(
        columns=tuple(each._replace(**changed.get(each.name, {})) for each in before.columns),
        sqlite=FIRST_CHOICE.format(completions=f"completions c ON {BY_KEY.replace('x.', 'c.')}"),
        postgresql=FIRST_CHOICE.format(completions=LOOKED_UP),
    )


def _completion_tokens(first: Any) -> Any:
    changed = {
        "token_id": {"sqlite": "json_extract(c.token_ids, '$[' || t.key || ']')"},
        "logprob": {"sqlite": "t.value"},
    }
    before = first.COMPLETION_TOKENS
    return before._replace(
        columns=tuple(each._replace(**changed.get(each.name, {})) for each in before.columns),
        sqlite="FROM completions c JOIN json_each(c.logprobs) t",
    )
