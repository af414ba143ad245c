"""Logs of long-running commands: text lines and JSON, without secrets and control characters."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from batchjobs.logs import IDS, JsonFormatter, LineFormatter, Redactor, log_to_stderr, name_worker
from batchjobs.settings import load_settings
from batchjobs.types import ShardId
from tests.support.cases import case

SHARD = ShardId("01ARZ3NDEKTSV4RRFFQ69G5FAV", 3)
PASSWORD = "s3cr3t/pass"
URLS = (
    f"redis://:{PASSWORD}@cache:6379/0",
    "redis://default:s3cr3t%2Fpass@cache:6379/0",
    f"postgresql://anna:{PASSWORD}@db/jobs?sslmode=require",
    f"postgresql://db/jobs?user=anna&password={PASSWORD}",
    f"https://anna:{PASSWORD}@hub.example/model",
)


class Log:
    """A logger of its own, and what it has written."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._stream = io.StringIO()
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(formatter)
        self.logger = logging.Logger("batchjobs.test")
        self.logger.addHandler(handler)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def line_log() -> Log:
    return Log(LineFormatter())


@pytest.fixture
def json_log() -> Log:
    return Log(JsonFormatter(worker="w1"))


@pytest.fixture(params=[LineFormatter, JsonFormatter], ids=["text", "json"])
def log(request: pytest.FixtureRequest) -> Log:
    return Log(request.param())


def raise_in(log: Log, message: str) -> None:
    """Logs a failure with its traceback, and the error that led to it."""
    try:
        try:
            raise OSError(f"cause: {message}")
        except OSError as error:
            raise ValueError(message) from error
    except ValueError:
        log.logger.exception("it failed")


class TestText:
    def test_a_line_is_time_level_and_message(self, line_log: Log) -> None:
        line_log.logger.warning("claimed shard %s (%d requests)", SHARD, 64, extra={"batch": "B"})
        line = rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING claimed shard {SHARD} \(64 requests\)\n"
        assert re.fullmatch(line, line_log.text)

    def test_the_time_is_utc(self, line_log: Log) -> None:
        record = logging.LogRecord("x", logging.INFO, "", 0, "event", (), None)
        record.created = 1_772_366_400.9
        line_log.logger.handle(record)
        assert line_log.text == "2026-03-01T12:00:00Z INFO event\n"

    def test_a_traceback_follows_its_line(self, line_log: Log) -> None:
        raise_in(line_log, "broken")
        first, second, *_, last = line_log.text.splitlines()
        assert first.endswith("ERROR it failed")
        assert second == "Traceback (most recent call last):"
        assert last == "ValueError: broken"

    def test_a_stack_that_was_asked_for_follows_too(self, line_log: Log) -> None:
        line_log.logger.info("here", stack_info=True)
        assert line_log.text.splitlines()[1] == "Stack (most recent call last):"


class TestJson:
    def test_each_line_is_one_object_with_the_same_fields(self, json_log: Log) -> None:
        json_log.logger.info("one\ntwo %s", "ü\u2028x")
        raise_in(json_log, "broken")
        plain, failed = json_log.lines
        assert list(plain) == ["time", "level", "logger", "event", "worker"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", plain["time"])
        assert (plain["level"], plain["logger"], plain["worker"]) == ("info", "batchjobs.test", "w1")
        assert plain["event"] == "one\\ntwo ü\\u2028x"
        assert failed["exception"].splitlines()[-1] == "ValueError: broken"
        assert "OSError: cause: broken" in failed["exception"]

    def test_ids_are_fields(self, json_log: Log) -> None:
        json_log.logger.info("of a request", extra={"batch": "B", "shard": 7, "request": 12})
        json_log.logger.info("of a shard", extra={"shard": SHARD, "request": 0})
        json_log.logger.info("claimed shard %s after %d s", SHARD, 3)
        json_log.logger.info("of nothing", extra={"other": 1})
        ids = [{name: line[name] for name in IDS if name in line} for line in json_log.lines]
        assert ids == [
            {"batch": "B", "shard": 7, "request": 12},
            {"batch": SHARD.batch_id, "shard": 3, "request": 0},
            {"batch": SHARD.batch_id, "shard": 3},
            {},
        ]
        assert json_log.lines[2]["event"] == f"claimed shard {SHARD} after 3 s"
        assert "other" not in json_log.lines[3]

    def test_a_lone_surrogate_and_odd_values_do_not_break_a_line(self, json_log: Log) -> None:
        json_log.logger.info("prompt %r", object(), extra={"request": ("a", "\udc80"), "batch": "\udc80"})
        json_log.logger.info("\udc80")
        assert json_log.lines[0]["batch"] == "\\udc80"
        assert json_log.lines[1]["event"] == "\\udc80"


@case("A-sec-02")
class TestControlCharacters:
    def test_they_are_shown_and_not_obeyed(self, log: Log) -> None:
        nasty = "\x1b]0;pwned\x07\x9b31m\u202e"
        log.logger.warning("name %s", f"{nasty}\nsecond line", extra={"batch": nasty})
        raise_in(log, nasty)
        for character in "\x1b\x07\x9b\u202e":
            assert character not in log.text
        shown = [line["event"] for line in log.lines] if log.text.startswith("{") else log.text.splitlines()
        assert shown[0].endswith("name \\x1b]0;pwned\\x07\\x9b31m\\u202e\\nsecond line")

    def test_a_parsed_json_line_has_none_either(self, json_log: Log) -> None:
        json_log.logger.info("\x1b[2J", extra={"batch": "\x1b[2J"})
        assert (json_log.lines[0]["event"], json_log.lines[0]["batch"]) == ("\\x1b[2J", "\\x1b[2J")


@case("A-sec-06")
class TestSecrets:
    @pytest.mark.parametrize("url", URLS)
    def test_the_password_of_a_url_is_hidden_wherever_it_stands(self, url: str, log: Log) -> None:
        log.logger.error(f"cannot reach {url}: refused")
        log.logger.error("cannot reach %s (%r)", url, (url, {"url": url}))
        log.logger.error("of", extra={"batch": url})
        raise_in(log, f"could not connect to '{url}'")
        log.logger.error("note", exc_info=RuntimeError(url))
        assert "s3cr3t" not in log.text
        assert log.text.count("***") >= 6

    def test_the_rest_of_the_line_stays(self, line_log: Log) -> None:
        line_log.logger.error("%s is away, and redis://cache:6379/1 too; ask anna@example.org", URLS[1])
        there = "redis://default:***@cache:6379/0 is away, and redis://cache:6379/1 too; ask anna@example.org"
        assert line_log.text.endswith(f"ERROR {there}\n")

    @pytest.mark.parametrize(
        "text",
        [
            "connection failed: host=db password=s3cr3t user=anna",
            "host=db password='s3cr3t \\' word' user=anna",
            "requirepass = s3cr3t",
            'passwd="s3cr3t" user=anna',
            "Authorization: Bearer s3cr3t-token",
            "token hf_s3cr3tS3cr3tS3cr3t",
        ],
    )
    def test_an_assigned_password_is_hidden(self, text: str, log: Log) -> None:
        log.logger.error(text)
        assert "s3cr3t" not in log.text
        assert "***" in log.text
        assert ("anna" in log.text) == ("anna" in text)

    @pytest.mark.parametrize("name", ["PGPASSWORD", "REDISCLI_AUTH", "HF_TOKEN"])
    def test_secrets_of_the_environment_are_hidden_by_themselves(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, "a+b (secret)")
        assert Redactor()("it was a+b (secret).") == "it was ***."

    @pytest.mark.parametrize("url", URLS[:4])
    def test_the_passwords_of_settings_are_hidden_by_themselves(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = "password authentication failed with s3cr3t/pass"
        assert Redactor()(asked) == asked
        assert Redactor([url])(asked) == "password authentication failed with ***"
        monkeypatch.setenv("BATCHJOBS_DATABASE_URL", url)
        assert Redactor()(asked) == "password authentication failed with ***"

    def test_a_password_within_another_one_leaves_nothing_over(self) -> None:
        hide = Redactor(["redis://:secret@h", "redis://:secret-and-more@h"])
        assert hide("secret-and-more, secret") == "***, ***"

    def test_a_very_short_one_is_hidden_in_urls_alone(self) -> None:
        hide = Redactor(["redis://:a@h"])
        assert hide("a word at redis://:a@h") == "a word at redis://:***@h"


class TestSetUp:
    @pytest.fixture(autouse=True)
    def _as_before(self, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
        root = logging.getLogger()
        names = ("batchjobs", "workers", "rq.worker", "rq.job", "rq.queue", "rq.registry")
        handlers, levels = list(root.handlers), {name: logging.getLogger(name).level for name in (None, *names)}
        self.written = lambda: capsys.readouterr().err
        yield
        root.handlers[:] = handlers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    def test_our_own_lines_and_warnings_of_libraries(self) -> None:
        log_to_stderr()
        logging.getLogger("batchjobs.worker").info("ours")
        logging.getLogger("workers.engine").debug("too much")
        logging.getLogger("urllib3").info("theirs")
        logging.getLogger("urllib3").warning("theirs, important")
        said = [line.split(" ", 1)[1] for line in self.written().splitlines()]
        assert said == ["INFO ours", "WARNING theirs, important"]

    def test_json_names_the_worker_once_it_is_known(self) -> None:
        log_to_stderr("json")
        logging.getLogger("batchjobs.worker").info("before")
        name_worker("gpu-7")
        logging.getLogger("batchjobs.worker").info("after")
        logging.getLogger("urllib3").warning("theirs")
        lines = [json.loads(line) for line in self.written().splitlines()]
        assert [line.get("worker") for line in lines] == [None, "gpu-7", "gpu-7"]

    def test_the_level_can_be_chosen(self) -> None:
        log_to_stderr("json", worker="w", level=logging.ERROR)
        logging.getLogger("batchjobs.worker").warning("no")
        logging.getLogger("batchjobs.worker").error("yes")
        (line,) = self.written().splitlines()
        assert (json.loads(line)["event"], json.loads(line)["worker"]) == ("yes", "w")

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_the_passwords_of_the_settings_are_known(self, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("BATCHJOBS_")]:
            monkeypatch.delenv(name)
        log_to_stderr(form, settings=load_settings(database_url="postgresql://anna:word-of-pass@db/jobs"))
        logging.getLogger("batchjobs.worker").warning("it said word-of-pass")
        written = self.written()
        assert "word-of-pass" not in written
        assert "it said ***" in written
