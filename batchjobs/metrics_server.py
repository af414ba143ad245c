"""Metrics over HTTP, for Prometheus to scrape: one registry of our own, in a thread that ends with the process."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from batchjobs.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MetricsServer:
    """Answers every path with the registry's metrics until it is closed. ``port`` is the real one."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """``port`` 0 takes any that is free. Raises UsageError where it cannot be had."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except socket.gaierror as error:
            raise UsageError(
                f"metrics cannot be served on {host!r}: {error.strerror}; give an address of this machine"
            ) from None
        except OSError as error:
            raise UsageError(
                f"metrics cannot be served on {host}:{port}: {error.strerror}; "
                "choose another port, or 0 for any that is free"
            ) from None
        self.port = int(self._server.server_port)
        self._lock = threading.Lock()
        self._is_open = True

    def close(self) -> None:
        """Stops serving and frees the port. May be called again."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
