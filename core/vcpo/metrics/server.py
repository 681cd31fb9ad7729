"""The HTTP endpoint that Prometheus scrapes."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server


class AddressError(OSError):
    """The server cannot listen on an address; the message names address, cause and cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsServer:
    """A running endpoint; as a context manager it closes at the end."""

    port: int
    """The port that it listens on."""
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
        """Stop the server and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Serve a registry at `http://host:port/metrics` from a daemon thread.

    port: 0 takes any free port.
    Raises: AddressError when the server cannot listen on the address.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); give another port, or 0"
            " for a free one"
        ) from error
    return MetricsServer(port=server.server_port, _server=server, _thread=thread)
