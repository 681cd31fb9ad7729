"""The registry of one part of a run, and the endpoint that Prometheus scrapes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from threading import Thread
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import Metric as Family


class PartRegistry(CollectorRegistry):
    """A registry that adds constant labels to every series.

    It leaves out gauges that nobody has set, which hold NaN: no alert fires on a 0 that nobody
    measured. It also leaves out `_created`, the start time of a counter, which doubles the series.

    part: `learner`, `rollout`, `host` or `operator`; a label of `vcpo_build_info`.
    """

    def __init__(self, part: str, **labels: str) -> None:
        super().__init__()
        self._constant = labels
        ProcessCollector(registry=self)
        PlatformCollector(registry=self)
        text = "Always 1; the labels name the part and its version."
        build = self.gauge("vcpo_build_info", text, "part version")
        build.labels(part, metadata.version("vcpo")).set(1)

    def collect(self) -> Iterable[Family]:
        for family in super().collect():
            labeled = Family(family.name, family.documentation, family.type, family.unit)
            labeled.samples = [
                sample._replace(labels={**self._constant, **sample.labels})
                for sample in family.samples
                if not (sample.name.endswith("_created") or math.isnan(sample.value))
            ]
            yield labeled

    def gauge(self, name: str, text: str, labels: str = "") -> Gauge:
        """Return a new gauge. labels: Their names, separated by spaces."""
        return Gauge(name, text, labels.split(), registry=self)

    def measure(self, name: str, text: str) -> Gauge:
        """Return a gauge that is exported once it was set."""
        gauge = self.gauge(name, text)
        gauge.set(math.nan)
        return gauge

    def counter(self, name: str, text: str, labels: str = "", **closed: Iterable[str]) -> Counter:
        """Return a counter, exported at 0 for all values of a label whose values are known.

        `increase()` does not see the first event of a series that begins with it.
        closed: The values, by label.
        """
        counter = Counter(name, text, (*labels.split(), *closed), registry=self)
        for values in product(*closed.values()) if closed else ():
            counter.labels(*values)
        return counter

    def histogram(self, name: str, text: str, *, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self)


class AddressError(OSError):
    """The server cannot listen on an address; the message names address, cause and fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsServer:
    """A running endpoint; as a context manager it closes at the end."""

    port: int
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
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
        server, thread = start_http_server(port, addr=host.strip("[]"), registry=registry)
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); give another port, or 0"
            " for a free one"
        ) from error
    return MetricsServer(port=server.server_port, _server=server, _thread=thread)
