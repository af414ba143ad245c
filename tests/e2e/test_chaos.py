"""The short version of `make chaos`: every fault once in some seconds, on both databases, and the audit of every row.

The long one is `python -m tests.chaos.run`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from batchjobs.types import SamplingParams
from tests.chaos.proxy import Network
from tests.chaos.rounding import Rounding
from tests.chaos.run import Options, run
from tests.chaos.schedule import Kind, draw
from tests.support.models import save_chat_model
from tests.support.sql import PostgresServer
from workers.engine import Engine, EngineConfig


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for the sockets in it; open to the server's system user. Kept when the test fails."""
    made = Path(tempfile.mkdtemp(prefix="bj-chaos-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize(("database", "kinds"), [("postgresql", 17), ("sqlite", 13)])
def test_nothing_is_lost_and_nothing_is_twice(folder: Path, database: str, kinds: int) -> None:
    options = Options(database=database, seconds=14, requests=1200, faults=kinds, tokens=12, seed=3, limit_seconds=90)
    result = run(options, folder)
    told = "\n".join([*result.violations, *result.lines, (folder / "events.log").read_text()])
    assert not result.violations, told
    assert result.done.get(Kind.KILL_WORKER), told
    assert sum(result.done.values()) >= kinds - 3, told  # a batch may be over before somebody cancels it


def test_a_seed_is_a_schedule() -> None:
    one, same, other = (draw(seed, 40, 60, "postgresql", 4.0) for seed in (1, 1, 2))
    assert one == same != other
    assert len({fault.kind for fault in one}) == 17
    assert [fault.at_seconds for fault in one] == sorted(fault.at_seconds for fault in one)
    assert one[0].at_seconds > 0
    assert one[-1].at_seconds < 60


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


def test_a_commit_is_cut_off_from_its_answer(network: Network, folder: Path, postgres_server: PostgresServer) -> None:
    """The proxy does what the run relies on: the transaction is there, and its client was told of nothing."""
    url = postgres_server.create_database(migrated=False)
    socket = Path(url.partition("host=")[2]) / ".s.PGSQL.5432"
    proxy = network.proxy(folder / socket.name, socket, sql=True)
    behind = f"{url.partition('?')[0]}?host={folder}"
    with psycopg.connect(behind) as connection:
        connection.execute("CREATE TABLE kept (number integer)")
    proxy.cut_after_commit(b"INSERT INTO kept")
    with psycopg.connect(behind) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
        connection.commit()  # nothing was written: it goes through
        connection.execute("INSERT INTO kept VALUES (1)")
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
    assert proxy.cut_commits == 1
    with psycopg.connect(behind) as connection:
        assert connection.execute("SELECT number FROM kept").fetchall() == [(1,)]
    proxy.refuse()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(behind)
    proxy.restore()
    with psycopg.connect(behind) as connection:
        connection.execute("INSERT INTO kept VALUES (2)")
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
    with psycopg.connect(behind) as connection:
        assert connection.execute("SELECT number FROM kept").fetchall() == [(1,)]
    postgres_server.drop_database(url)


def test_rounding_forgives_no_wrong_token(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path)
    line = {"prompt": "a tale", "max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 5, "ignore_eos": True}
    engine = Engine(str(model), EngineConfig(device="cpu", dtype="float32", num_blocks=64))
    [answer] = engine.generate([line["prompt"]], SamplingParams.from_fields(line))
    rounding = Rounding(model)
    assert rounding.allows(line, 0, answer.token_ids)
    for at in (0, 7, 23):
        wrong = (*answer.token_ids[:at], (answer.token_ids[at] + 1) % engine.vocab_size, *answer.token_ids[at + 1 :])
        assert not rounding.allows(line, 0, wrong)
    assert not rounding.allows(line, 0, (*answer.token_ids, 5))
