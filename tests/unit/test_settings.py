"""Flags > BATCHJOBS_* > ./batchjobs.toml > the user's config > defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchjobs.errors import UsageError
from batchjobs.settings import Settings, load_settings
from batchjobs.types import Priority
from tests.support.cases import case


@pytest.fixture(autouse=True)
def _nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("BATCHJOBS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))


def write_user_file(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "config" / "batchjobs" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return path


def test_defaults(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.home == tmp_path / "me" / ".batchjobs"
    assert settings.store_url == f"sqlite:///{tmp_path}/me/.batchjobs/batchjobs.sqlite3"
    assert (settings.redis_url, settings.database_url, settings.model) == (None, None, None)
    assert (settings.queue, settings.shard_size) == (Priority.DEFAULT, 64)
    assert (settings.lease_seconds, settings.heartbeat_seconds) == (15, 3)
    assert set(settings.sources.values()) == {"default"}


def test_each_layer_wins_over_those_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = write_user_file(tmp_path, 'model = "user"\nshard_size = 1\npage_size = 1\nnum_blocks = 1\n')
    Path("batchjobs.toml").write_text('model = "local"\nshard_size = 2\npage_size = 2\n')
    monkeypatch.setenv("BATCHJOBS_MODEL", "env")
    monkeypatch.setenv("BATCHJOBS_SHARD_SIZE", "3")
    settings = load_settings(model="flag", device=None)
    assert (settings.model, settings.shard_size, settings.page_size, settings.num_blocks) == ("flag", 3, 2, 1)
    sources = settings.sources
    assert sources["model"] == "flag"
    assert sources["shard_size"] == "BATCHJOBS_SHARD_SIZE"
    assert sources["page_size"] == "batchjobs.toml"
    assert sources["num_blocks"] == str(user)
    assert sources["device"] == "default"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHJOBS_DATABASE_URL", "")
    assert load_settings().database_url is None
    assert load_settings().sources["database_url"] == "default"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("shard_size = 0", r"setting shard_size \(from batchjobs.toml\): input should be greater than or equal to 1"),
        ('queue = "urgent"', r"setting queue \(from batchjobs.toml\): input should be 'high', 'default' or 'low'"),
        ("shardsize = 5", 'batchjobs.toml: unknown setting "shardsize"; did you mean shard_size?'),
        ("shard_size =", "cannot read the settings in batchjobs.toml"),
        ("lease_seconds = 5", "heartbeat_seconds must be at most half of lease_seconds"),
    ],
)
def test_bad_settings_say_where_they_stand(content: str, message: str) -> None:
    Path("batchjobs.toml").write_text(content)
    with pytest.raises(UsageError, match=message):
        load_settings()


@case("A-sec-06")
def test_no_password_is_ever_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHJOBS_REDIS_URL", "redis://:s3cret@h:1/0")
    settings = load_settings(database_url="postgresql://u:p%40ss@h/db")
    assert settings.shown("redis_url") == "redis://:***@h:1/0"
    assert settings.shown("database_url") == "postgresql://u:***@h/db"
    assert "s3cret" not in repr(settings) + str(settings)
    assert "p%40ss" not in repr(settings) + str(settings)
    with pytest.raises(UsageError) as caught:
        load_settings(redis_url=["redis://:s3cret@h"])
    assert "s3cret" not in str(caught.value)


def test_a_child_process_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(model="m", shard_size=5, redis_url="redis://:s3cret@h/0", home="relative")
    for name, value in settings.as_environment().items():
        monkeypatch.setenv(name, value)
    child = load_settings()
    assert {name: getattr(child, name) for name in Settings.model_fields} == {
        name: getattr(settings, name) for name in Settings.model_fields
    }


def test_home_is_absolute_and_its_tilde_is_this_users(tmp_path: Path) -> None:
    assert load_settings(home="~/x").home == tmp_path / "me" / "x"
    assert load_settings(home="x").home == tmp_path / "x"
