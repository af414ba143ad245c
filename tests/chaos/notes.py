"""What the database itself notes while a run goes on: triggers write down every change of completions and shards.

Two tables, filled in the very transaction of the change. ``chaos_rows``: each insert, update and delete of a
completion, and the shard that covered it at that moment. ``chaos_shards``: each change of a shard's state, owner or
fence, and each shard that was removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchjobs.database import Database

_ROWS = 'batch_id, "index", choice, status, worker, attempt, error_code, shard_no, owner, fence, state, attempts'
_SHARDS = "batch_id, shard_no, old_fence, new_fence, old_state, new_state, old_owner, new_owner, old_lease_until"

_TABLES = (
    """CREATE TABLE chaos_rows (
  id {serial}, action text, batch_id text, "index" bigint, choice integer, status text, worker text, attempt integer,
  error_code text, shard_no integer, owner text, fence bigint, state text, attempts integer, at_seconds {double})""",
    """CREATE TABLE chaos_shards (
  id {serial}, action text, batch_id text, shard_no integer, old_fence bigint, new_fence bigint, old_state text,
  new_state text, old_owner text, new_owner text, old_lease_until {double}, at_seconds {double})""",
)
_COVERING = """FROM (SELECT 1 AS one) AS single
  LEFT JOIN shards s ON s.batch_id = {row}.batch_id AND {row}."index" BETWEEN s.first_index AND s.last_index"""
_NOTE_ROW = """INSERT INTO chaos_rows (action, {columns}, at_seconds)
  SELECT '{action}', {row}.batch_id, {row}."index", {row}.choice, {row}.status, {row}.worker, {row}.attempt, {code},
    s.shard_no, s.owner, s.fence, s.state, s.attempts, {now}
  {covering};"""
_NOTE_SHARD = """INSERT INTO chaos_shards (action, {columns}, at_seconds) VALUES ('{action}',
    OLD.batch_id, OLD.shard_no, OLD.fence, {new}.fence, OLD.state, {new}.state, OLD.owner, {new}.owner,
    OLD.lease_until, {now});"""
_CHANGED = "OLD.fence <> NEW.fence OR OLD.state <> NEW.state OR coalesce(OLD.owner, '') <> coalesce(NEW.owner, '')"

_KINDS = {
    "sqlite": {
        "serial": "integer PRIMARY KEY AUTOINCREMENT",
        "double": "double",
        "now": "(julianday('now') - 2440587.5) * 86400.0",
        "code": "json_extract({row}.error, '$.code')",
    },
    "postgresql": {
        "serial": "bigserial PRIMARY KEY",
        "double": "double precision",
        "now": "extract(epoch FROM clock_timestamp())",
        "code": "{row}.error ->> 'code'",
    },
}


def keep_notes(database: Database) -> None:
    """Makes the tables and the triggers."""
    kind = "sqlite" if database.is_sqlite else "postgresql"
    statements = [table.format(**_KINDS[kind]) for table in _TABLES]
    for table, action, condition, body in _noted(kind):
        statements += _trigger(kind, table, action, condition, body)
    with database.writing() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%") if kind == "postgresql" else statement)


def _noted(kind: str) -> list[tuple[str, str, str, str]]:
    """(table, action, condition, what is done)."""
    now = _KINDS[kind]["now"]
    noted = []
    for action in ("insert", "update", "delete"):
        row = "OLD" if action == "delete" else "NEW"
        code, covering = _KINDS[kind]["code"].format(row=row), _COVERING.format(row=row)
        body = _NOTE_ROW.format(columns=_ROWS, action=action, row=row, code=code, now=now, covering=covering)
        noted.append(("completions", action, "", body))
    for action, new, condition in (("update", "NEW", _CHANGED), ("delete", "OLD", "")):
        body = _NOTE_SHARD.format(columns=_SHARDS, action=action, new=new, now=now)
        noted.append(("shards", action, condition, body))
    return noted


def _trigger(kind: str, table: str, action: str, condition: str, body: str) -> list[str]:
    name = f"chaos_{table}_{action}"
    when = f"WHEN ({condition})" if condition else ""
    head = f"CREATE TRIGGER {name} AFTER {action.upper()} ON {table} FOR EACH ROW {when}"
    if kind == "sqlite":
        return [f"{head} BEGIN {body} END"]
    function = f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} RETURN NULL; END$$"
    return [function, f"{head} EXECUTE FUNCTION {name}()"]
