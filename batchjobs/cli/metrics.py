"""``batchjobs metrics``: the queue and the store, as Prometheus reads them."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, NoReturn

import click

from batchjobs.cli.options import settings_of

if TYPE_CHECKING:
    from types import FrameType

    from batchjobs.metrics import Exporter

PORT = 9410


@click.command("metrics")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help=f"Default: {PORT}; 0: any that is free.")
@click.option("--host", help="Address to serve on; default: the setting metrics_host, 127.0.0.1.")
@click.option("--once", is_flag=True, help="Print the metrics and end.")
@click.pass_context
def metrics_command(ctx: click.Context, port: int, host: str | None, once: bool) -> None:
    """Serve metrics of queue and store for Prometheus, until SIGTERM or Ctrl-C.

    Workers have metrics of their own, see `batchjobs worker --metrics-port`. A database or a Redis that does not answer
    is told by the metric batchjobs_up; the command goes on and asks again.
    """
    from batchjobs.logs import log_to_stderr
    from batchjobs.metrics import Exporter

    settings = settings_of(ctx)
    log_to_stderr(settings.log_format, settings=settings)
    exporter = Exporter(settings)
    try:
        if once:
            click.echo(exporter.text(), nl=False)
        else:
            _serve(exporter, host or settings.metrics_host, port)
    finally:
        exporter.close()


def _serve(exporter: Exporter, host: str, port: int) -> None:
    from batchjobs.metrics_server import MetricsServer

    server = MetricsServer(exporter.registry, host, port)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _end)
        place = f"[{host}]" if ":" in host else host
        logging.getLogger("batchjobs.metrics").info("metrics at http://%s:%d/metrics", place, server.port)
        threading.Event().wait()
    finally:
        server.close()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)
