"""Names, ids, files and lines that mean harm, on real databases and servers. SECURITY.md names these tests."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from datetime import UTC, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchjobs import checkup
from batchjobs.embedded import EmbeddedRedis
from batchjobs.errors import BatchjobsError
from batchjobs.folders import own_folder
from batchjobs.store import Store
from tests.support.batches import submit
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line
from tests.support.models import CHAT_TEMPLATE, save_chat_model
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.machine import Machine

__all__ = ["command_line"]

ROOT = Path(__file__).parents[2]
EVIL = "\x1b[2J\x1b]0;pwned\x07\u202e"


@pytest.fixture
def on_it(command_line: CommandLine, database_url: str, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command line on that database."""
    monkeypatch.setenv("BATCHJOBS_DATABASE_URL", database_url)
    return command_line


# -------------------------------------------------------------------------------------------------- names, ids, times


@case("A-sec-08", "A-cli-04")
def test_a_name_is_matched_letter_by_letter(on_it: CommandLine, store: Store) -> None:
    names = ["x') OR 1=1 --", "%", "_", "job_1", "job11", "JOB_1", "job_1 ", "'; DROP TABLE batches; --", EVIL, "-rf"]
    made = {name: submit(store, 1, name=name) for name in names}
    for name in names:
        (row,) = on_it.json_lines("list", "--name", name)
        assert (row["id"], row["name"]) == (made[name], name)
    for name in ("job%", "j_b_1", "x') or 1=1 --", "job"):
        assert on_it.json_lines("list", "--name", name) == []
    assert "no such batches" in on_it.run("list", "--name", "job%").stderr
    assert len(on_it.json_lines("list")) == len(names)
    assert store.batches(name="a\0b") == []


@case("A-sec-08", "A-cli-04")
def test_an_id_is_matched_letter_by_letter_by_every_command(on_it: CommandLine, store: Store) -> None:
    batch = submit(store, 2)
    for given in (batch.lower(), batch[:-1], f"{batch} ", "%", "_" * 26, "x' OR '1'='1", "../../etc", EVIL, "", "-rf"):
        for command in (
            ("status",),
            ("wait", "--timeout", "0"),
            ("follow",),
            ("results",),
            ("show", "--custom-id", "request-0"),
            ("cancel", "--yes"),
            ("pause",),
            ("resume",),
            ("retry",),
        ):
            done = on_it.run(*command, "--", given)
            assert done.exit_code == 4, (command, given, done.output)
            assert "\x1b" not in done.output
        for command in (("show",), ("cancel", "--yes", "--request")):
            done = on_it.run(*command, f"{given}/0") if given != "-rf" else on_it.run("show", "--", f"{given}/0")
            assert done.exit_code in (2, 4), (command, given, done.output)
    for custom_id in ("%", "REQUEST-0", "request_0", "' OR 1=1 --"):
        assert on_it.run("show", batch, "--custom-id", custom_id).exit_code == 4
    info = store.batch(batch)
    assert (info.status, info.paused, info.counts.queued) == ("queued", False, 2)


@case("A-sql-07")
def test_a_list_is_cut_at_instants_however_they_are_written(on_it: CommandLine, store: Store) -> None:
    batch = submit(store, 1)
    created = store.batch(batch).created_at
    moment = timedelta(milliseconds=2)

    def found(option: str, text: str) -> list[str]:
        return [row["id"] for row in on_it.json_lines("list", option, text)]

    for zone in (UTC, timezone(timedelta(hours=-8)), timezone(timedelta(hours=5, minutes=45))):
        at, later = created.astimezone(zone).isoformat(), (created + moment).astimezone(zone).isoformat()
        assert found("--since", at) == [batch] == found("--until", later)
        assert found("--since", later) == [] == found("--until", at)
    naive = (created + moment).replace(tzinfo=None).isoformat()
    assert (found("--until", naive), found("--since", naive)) == ([batch], [])  # UTC
    assert store.batches(until=(created + moment).replace(tzinfo=None)) == store.batches()
    assert found("--since", "2h") == [batch] == found("--since", "1d")
    assert found("--until", "90min") == []
    for odd in ("yesterday", "2026-13-01", "0001-01-01T00:00+14:00", "999999w", EVIL):
        done = on_it.run("list", "--since", odd)
        assert (done.exit_code, "is no instant" in done.stderr, "\x1b" in done.output) == (2, True, False)


# ----------------------------------------------------------------------------------------------- terminals and secrets


@case("A-sec-02")
def test_an_argument_that_a_command_repeats_drives_no_terminal(command_line: CommandLine) -> None:
    for arguments in (["cancel", "x", EVIL], [f"--{EVIL}"], [EVIL], ["list", "--limit", EVIL], ["results", "x", EVIL]):
        done = command_line.run(*arguments)
        assert done.exit_code == 2
        assert "\x1b" not in done.output
        assert "\u202e" not in done.output


@case("A-sec-02")
def test_json_on_a_terminal_is_escaped_and_stays_the_same_json(command_line: CommandLine) -> None:
    odd = "\x1b[2J \x9b31m \x7f \u202e \u2028 \u061c \u2066 é 問"
    batch = command_line.submit({"custom_id": odd, "prompt": "a"}, options=("--name", odd))
    for arguments in (["status", batch], ["list"], ["show", f"{batch}/0"]):
        (line,) = command_line.out(*arguments, "--json").splitlines()
        assert odd in (json.loads(line).get("name"), json.loads(line).get("custom_id"))
        assert line.isprintable()
        assert "é 問" in line


URLS = {
    "BATCHJOBS_REDIS_URL": "redis://:s3cretword@127.0.0.1:1/0",
    "BATCHJOBS_DATABASE_URL": "postgresql://u:p%40ssphrase@127.0.0.1:1/db",
}


@case("A-sec-06")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--debug", "worker", "--log-format", "json"], 3),
        (["--debug", "list"], 3),
        (["--debug", "submit", str(ROOT / "README.md")], 3),
        (["metrics", "--once"], 0),
        (["config", "show", "--json"], 0),
    ],
)
def test_no_password_is_written_by_a_command_that_fails(tmp_path: Path, arguments: list[str], code: int) -> None:
    """Neither as it is nor percent-encoded, in an environment in which both servers cannot be reached."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHJOBS_")}
    done = subprocess.run(
        [sys.executable, "-m", "batchjobs", *arguments],
        cwd=ROOT,
        env=kept | URLS | {"BATCHJOBS_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    for secret in ("s3cretword", "p@ssphrase", "p%40ssphrase", "ssphrase"):
        assert secret not in done.stdout + done.stderr


@case("A-sec-06")
def test_no_password_is_in_what_doctor_finds(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_device", lambda settings: ("pass", "CPU"))
    monkeypatch.setattr(checkup, "_model", lambda settings: ("pass", "a model"))
    for name, value in URLS.items():
        monkeypatch.setenv(name, value)
    done = command_line.run("--debug", "doctor")
    assert "127.0.0.1:1" in done.output
    assert "ssphrase" not in done.output
    assert "s3cretword" not in done.output


@case("A-sec-06")
def test_no_password_is_on_a_command_line_or_in_what_a_store_says_of_itself(tmp_path: Path) -> None:
    from batchjobs.cli.local_worker import worker_command

    assert not any("://" in word for word in worker_command())
    for url in (URLS["BATCHJOBS_DATABASE_URL"], "postgresql://127.0.0.1:1/db?user=u&password=p%40ssphrase"):
        store = Store(url)
        assert "ssphrase" not in store.url_without_password + repr(store)
        store.close()


# --------------------------------------------------------------------------------------------------- files and folders


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_stored_is_for_this_user_alone(tmp_path: Path) -> None:
    """With the usual umask: the home, the database with its log, and the private Redis."""
    home, before = tmp_path / "home", os.umask(0o022)
    try:
        store = Store(f"sqlite:///{own_folder(home) / 'batchjobs.sqlite3'}")
        store.prepare()
        submit(store, 1)
        server = EmbeddedRedis(home)
    finally:
        os.umask(before)
    try:
        eventually(lambda: any(server.folder.rglob("*.aof")), "it keeps its log")
        assert [mode(folder) for folder in (home, server.folder)] == [0o700] * 2
        assert mode(server.socket_path) == 0o700
        files = [file for file in home.rglob("*") if file.is_file()]
        assert {"batchjobs.sqlite3", "batchjobs.sqlite3-wal", "redis.log"} <= {file.name for file in files}
        assert {mode(file) for file in files} == {0o600}
    finally:
        server.close()
        store.close()


def test_a_home_that_exists_keeps_its_mode_and_its_new_files_are_private(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    home = tmp_path / "home"
    home.symlink_to("real")
    store = Store(f"sqlite:///{own_folder(home) / 'batchjobs.sqlite3'}")
    store.prepare()
    store.close()
    assert mode(tmp_path / "real") == 0o755
    assert mode(home / "batchjobs.sqlite3") == 0o600


def test_a_home_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 4321, -1) if os.getuid() == 0 else None
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    with pytest.raises(BatchjobsError, match="is another user's folder; set BATCHJOBS_HOME to a folder of your own"):
        own_folder(home)


@pytest.mark.parametrize(
    ("permissions", "advice"), [(0o777, ", or run: chmod o-w {}"), (0o702, ", or run: chmod o-w {}"), (0o1777, "")]
)
def test_a_home_in_which_everybody_can_write_is_refused(tmp_path: Path, permissions: int, advice: str) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    home.chmod(permissions)
    with pytest.raises(BatchjobsError) as refused:
        own_folder(home)
    assert str(refused.value) == (
        f"every user can write in {home} and exchange the database; set BATCHJOBS_HOME to a folder of your own"
        + advice.format(f"'{home}'")
    )
    for harmless in (0o755, 0o775, 0o2770, 0o500):
        home.chmod(harmless)
        assert own_folder(home) == home


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_database_that_another_user_planted_is_refused(tmp_path: Path) -> None:
    """Itself, its log, or a link in its place. What the owner of the home made is no surprise, as in a container."""
    theirs, home = tmp_path / "theirs", tmp_path / "home"
    theirs.touch()
    os.chown(theirs, 4321, -1)
    for name in ("batchjobs.sqlite3", "batchjobs.sqlite3-wal"):
        home.mkdir()
        file = home / name
        file.touch()
        assert own_folder(home) == home
        os.chown(file, 4321, -1)
        refused(home, file)
        os.chown(home, 4321, -1)
        assert own_folder(home) == home
        shutil.rmtree(home)
    home.mkdir()
    (home / "batchjobs.sqlite3").symlink_to(theirs)
    refused(home, home / "batchjobs.sqlite3")
    theirs.unlink()
    own_folder(home)
    os.chown(home / "batchjobs.sqlite3", 4321, -1, follow_symlinks=False)
    refused(home, home / "batchjobs.sqlite3")


def refused(home: Path, file: Path) -> None:
    with pytest.raises(BatchjobsError, match=f"^{file} belongs to another user, who could .*; move it away, or set"):
        own_folder(home)


@case("A-sec-07")
def test_no_id_becomes_a_file_name(command_line: CommandLine, tmp_path: Path) -> None:
    """Every file that a submission and its results make is known before."""
    ids = ["../../etc/cron.d/pwn", "/abs", "C:\\x", "a/b", ".", "..", "NUL", "~", "$HOME", "a\nb", "x" * 512]
    lines = [{"custom_id": each, "prompt": "a", "suffix": "."} for each in ids]
    batch = command_line.submit(*lines, options=("--on-invalid", "skip", "--name", "../../name", "--key", "../key"))
    for form in ("jsonl", "openai", "csv"):
        command_line.out(
            "results", batch, "--format", form, "-o", f"out.{form}", *["--errors", "e"] * (form == "openai")
        )
    made = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert made - {f"home/batchjobs.sqlite3{end}" for end in ("", "-wal", "-shm")} == {
        "out.jsonl", "out.openai", "out.csv", "e"
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ids


# ---------------------------------------------------------------------------------------- lines that ask for too much


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its chat template is expensive where a message says so."""
    folder = save_chat_model(tmp_path_factory.mktemp("model"))
    loops = "{% for a in range(999) %}" * 3 + "{% endfor %}" * 3
    (folder / "chat_template.jinja").write_text(
        "{% if 'bad' in messages[0].content %}" + loops + "{% endif %}" + CHAT_TEMPLATE
    )
    return folder


def bomb(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "bomb", "schema": schema}}


@case("A-sec-04", "A-sec-09", "A-sec-03")
def test_lines_that_ask_for_too_much_cost_themselves_alone(embedded: Machine, tmp_path: Path) -> None:
    """Each fails or is answered, and their neighbours are answered, by one worker that lives on."""
    many = {str(number): 1 for number in range(5000)}
    chat = [{"role": "user", "content": "hi"}]
    lines = {
        "first": {"prompt": "hi"},
        "expensive template": {"messages": [{"role": "user", "content": "bad"}]},
        "chat": {"messages": chat},
        "own template": {"messages": chat, "chat_template": "{{ 7 * 7 }}"},
        "nested template": {"messages": chat, "chat_template_kwargs": {"chat_template": "{% for i in range(10**9) %}"}},
        "long": {"prompt": "a" * 50_000},
        "long chat": {"messages": [{"role": "user", "content": "a" * 50_000}]},
        "many messages": {"messages": chat * 1000},
        "ids": {"prompt": [3] * 50_000},
        "bias": {"prompt": "hi", "logit_bias": many},
        "stop ids": {"prompt": "hi", "stop_token_ids": list(range(50_000))},
        "stops": {"prompt": "hi", "stop": ["x" * 20_000] * 16},
        "metadata": {"prompt": "hi", "metadata": {"x": "y" * 500_000}},
        "pattern": {"prompt": "hi", "response_format": bomb({"type": "string", "pattern": "(.*a){25}.{200}$"})},
        "nested": {"prompt": "hi", "response_format": bomb({"anyOf": [{"anyOf": [{"type": "null"}] * 40}] * 40})},
        "loop": {"prompt": "hi", "response_format": bomb({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})},
        "items": {"prompt": "hi", "response_format": bomb({"type": "array", "minItems": 10**9})},
        "last": {"prompt": "hi"},
    }
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    common = {"max_tokens": 3, "ignore_eos": True, "model": str(tmp_path / "another")}
    with source.open("w") as stream:
        stream.writelines(json.dumps({"custom_id": name, **common, **line}) + "\n" for name, line in lines.items())
    embedded.call("run", str(source), "-o", str(target), "--on-invalid", "skip", code=5)
    rows = {row["custom_id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert list(rows) == list(lines)
    for name in ("first", "last", "chat", "stops", "metadata"):
        assert (rows[name]["status"], rows[name]["completion_tokens"]) == ("completed", 3), rows[name]["error"]
    assert {row["worker"] for row in rows.values() if row["status"] == "completed"} == {rows["first"]["worker"]}
    assert all(row["model"] == "model" or row["model"].startswith("model") for row in rows.values() if row["model"])
    errors = {name: row["error"]["message"] for name, row in rows.items() if row["error"] is not None}
    assert errors["expensive template"].startswith("the chat template is too expensive")
    assert "chat_template" in errors["own template"]
    assert '"chat_template" is not allowed' in errors["nested template"]
    for name in ("long", "long chat", "many messages", "ids"):
        assert rows[name]["error"]["code"] == "context_length_exceeded"
    for name in ("bias", "stop ids", "loop"):
        assert rows[name]["status"] == "failed"
