"""Several choices of a request: the view `results` shows the worst one's state. And a place for prompt logprobs.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COMMENT = "With choice 0 where asked for: token_ids, tokens, logprobs and top_logprobs of the prompt"
ABOUT = "One row a request: what was asked, where it is (the worst choice), what came out (the first choice)"

# The choice to which the request owes its state, and its error.
WORST = """
LEFT JOIN completions w ON w.batch_id = r.batch_id AND w."index" = r."index" AND w.choice = (
  SELECT x.choice FROM completions x
  WHERE x.batch_id = r.batch_id AND x."index" = r."index"
  ORDER BY CASE x.status WHEN 'cancelled' THEN 0 WHEN 'expired' THEN 1 WHEN 'failed' THEN 2 ELSE 3 END, x.choice
  LIMIT 1
)
"""
OF_THE_WORST = ("state", "error_code", "error_message")


def upgrade() -> None:
    op.add_column("completions", sa.Column("prompt_logprobs", sa.JSON(), nullable=True, comment=COMMENT))
    first = _first_revision()
    columns = tuple(_of_the_worst(each) if each.name in OF_THE_WORST else each for each in first.RESULTS.columns)
    tables = first.FROM_REQUESTS.rstrip() + WORST
    _replace(first, first.RESULTS._replace(comment=ABOUT, columns=columns, sqlite=tables, postgresql=tables))


def downgrade() -> None:
    first = _first_revision()
    op.execute("DROP VIEW completion_tokens")  # SQLite drops no column of a table that a view reads all columns of
    _replace(first, first.RESULTS)
    op.drop_column("completions", "prompt_logprobs")
    first._create_view(first.COMPLETION_TOKENS)


def _first_revision() -> Any:
    """Views are written as there."""
    return context.script.get_revision("0001").module


def _of_the_worst(column: Any) -> Any:
    postgresql = column.postgresql and column.postgresql.replace("c.", "w.")
    return column._replace(sqlite=column.sqlite.replace("c.", "w."), postgresql=postgresql)


def _replace(first: Any, view: Any) -> None:
    op.execute(f"DROP VIEW {view.name}")
    first._create_view(view)
