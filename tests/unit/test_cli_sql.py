"""``batchjobs sql``: where the query comes from, and the forms of what comes out."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import pytest

from tests.support.command_line import CommandLine, command_line

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["command_line"]

QUERY = "SELECT custom_id, NULL AS missing, 'a,\"b\"' AS text FROM requests ORDER BY 1;\n-- a comment\n"


def test_csv_is_csv(command_line: CommandLine) -> None:
    command_line.submit({"custom_id": "x\ny", "prompt": "a"}, {"custom_id": "あ", "prompt": "b"})
    expected = 'custom_id,missing,text\n"x\ny",,"a,""b"""\nあ,,"a,""b"""\n'
    assert command_line.out("sql", "--csv", QUERY) == expected
    assert command_line.out("sql", "--csv", "--limit", 1, QUERY) == expected[: expected.index("あ")]
    assert command_line.out("sql", "--csv", "SELECT custom_id FROM requests WHERE 1 = 0") == "custom_id\n"
    with_cr = command_line.out("sql", "--csv", "SELECT 'a' || char(13) || 'b' AS x, 1 AS y")
    assert list(csv.reader(io.StringIO(with_cr, newline=""))) == [["x", "y"], ["a\rb", "1"]]


def test_the_query_may_come_from_a_file_or_stdin(command_line: CommandLine, tmp_path: Path) -> None:
    command_line.submit({"prompt": "a"})
    expected = [{"custom_id": "request-0", "missing": None, "text": 'a,"b"'}]
    file = tmp_path / "question.sql"
    file.write_text(QUERY)
    assert command_line.json_lines("sql", f"@{file}") == expected
    assert command_line.out("sql", "-", "--csv", stdin=QUERY.encode()).splitlines()[1] == 'request-0,,"a,""b"""'


def test_what_cannot_be_a_query(command_line: CommandLine, tmp_path: Path) -> None:
    missing = command_line.run("sql", f"@{tmp_path / 'nope.sql'}")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert missing.stderr.endswith("nope.sql: No such file or directory; name a file that holds one query\n")
    wrong = command_line.run("sql", "-", stdin=b"SELECT '\xff'")
    assert (wrong.exit_code, wrong.stderr) == (2, "batchjobs: -: the query is not valid UTF-8\n")
    assert command_line.run("sql", "-", stdin=b"").exit_code == 2
    assert "choose one" in command_line.run("sql", "--csv", "--json", "SELECT 1").stderr


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_all_rows_come_unless_a_limit_is_given(command_line: CommandLine, form: str) -> None:
    numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 1500) SELECT x FROM n"
    done = command_line.run("sql", form, numbers)
    assert (done.exit_code, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1500 + (form == "--csv")
    assert len(command_line.out("sql", form, numbers, "--limit", 7).splitlines()) == 7 + (form == "--csv")
    table = command_line.run("sql", numbers)
    assert (len(table.stdout.splitlines()), table.stderr) == (1002, "only the first 1,000 rows; --limit shows more\n")


def test_an_endless_query_is_ended(command_line: CommandLine) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    done = command_line.run("sql", endless, "--timeout", 0.05)
    assert done.exit_code == 124
    assert "the query took longer than its timeout of 0.05 s; ask about one batch, or allow more" in done.stderr
