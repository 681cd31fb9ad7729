"""Traces of trajectories in OpenTelemetry, from the grant of a lease to the weights that follow.

    trace of a lease    lease.grant > environment, generate, environment, submit > buffer
    trace of a step     update > score, backward, optimizer, publish > fetch, swap

A batch has many trajectories, so `update` has no parent: it links to the `buffer` spans that it
ends. The learner samples leases when it grants them, and a step has a trace if a sampled trajectory
is in its batch. Who receives the W3C `traceparent` of a sampled lease records its part, and so a
trajectory is traced as a whole or not at all.

Nothing is recorded unless `OTEL_EXPORTER_OTLP_ENDPOINT` is set. OpenTelemetry is not imported then,
and every function here returns at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanContext, Tracer

ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""Environment variable with the URL of the collector, such as `http://collector:4318`."""
TRACEPARENT: Final = "traceparent"
"""Key of the trace context in the metadata of a call; https://www.w3.org/TR/trace-context."""

_LOGGER = logging.getLogger(__name__)
_PROTOCOL_VARIABLE: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
_NOTHING: Final[AbstractContextManager[None]] = contextlib.nullcontext()
_FLUSH_S: Final = 3.0

Attributes = Mapping[str, str | int | float]

_tracer: Tracer | None = None
_provider: TracerProvider | None = None


def start(service: str, attributes: Attributes) -> None:
    """Export the spans of this process from now on, if a collector is named.

    service: `vcpo-learner` or `vcpo-rollout`.
    attributes: of the process, on all of its spans.
    """
    if not os.environ.get(ENDPOINT_VARIABLE):
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

        exporter: SpanExporter
        if os.environ.get(_PROTOCOL_VARIABLE, "http/protobuf") == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

            exporter = grpc_exporter.OTLPSpanExporter()
        else:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

            exporter = http_exporter.OTLPSpanExporter()
    except ImportError as error:
        _LOGGER.warning(
            "%s is set, but there are no traces: %s. Cure: pip install 'vcpo[tracing]'",
            ENDPOINT_VARIABLE,
            error,
        )
        return
    resource = Resource.create({"service.name": service, **attributes})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    use(provider)


def use(provider: TracerProvider) -> None:
    """Record spans with a provider from now on."""
    global _tracer, _provider
    _provider, _tracer = provider, provider.get_tracer("vcpo")


def stop() -> None:
    """Record no more spans; wait a few seconds at most for those on their way to the collector."""
    global _tracer, _provider
    provider, _tracer, _provider = _provider, None, None
    if provider is not None:
        # A collector that is down would hold up the end of the process.
        closing = threading.Thread(target=provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)


def is_on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def root(
    name: str, attributes: Attributes, *, links: Sequence[SpanContext] = ()
) -> AbstractContextManager[object]:
    """Record the block as the first span of a new trace; spans below it are its children."""
    if _tracer is None:
        return _NOTHING
    from opentelemetry.context import Context
    from opentelemetry.trace import Link

    return _tracer.start_as_current_span(
        name, Context(), attributes=attributes, links=[Link(context) for context in links]
    )


def child(name: str, attributes: Attributes | None = None) -> AbstractContextManager[object]:
    """Record the block as a child of the current span; do nothing if there is none."""
    if _tracer is None or not _has_span():
        return _NOTHING
    return _tracer.start_as_current_span(name, attributes=attributes)


def continue_span(parent: str) -> AbstractContextManager[None]:
    """Make another process's span current for the block; do nothing if `parent` is empty.

    parent: a `traceparent`; a malformed one counts as empty.
    """
    return _NOTHING if _tracer is None or not parent else _attach(parent)


def traceparent() -> str:
    """Return the current span as other processes need it; empty if there is none."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(TRACEPARENT, "")


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata by which a gRPC call carries the current span; empty without one."""
    current = traceparent()
    return ((TRACEPARENT, current),) if current else ()


def parent_of_call(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the `traceparent` in the metadata of a received call; empty if there is none."""
    if _tracer is None:
        return ""
    return next((str(value) for key, value in metadata if key == TRACEPARENT), "")


def begin(name: str, parent: str, attributes: Attributes) -> Span | None:
    """Begin a span that the caller ends, below another process's span; None without one."""
    if _tracer is None or not parent:
        return None
    with continue_span(parent):
        return _tracer.start_span(name, attributes=attributes) if _has_span() else None


def record(name: str, *, start_s: float, end_s: float) -> None:
    """Record a child of the current span that is over; times are Unix times."""
    if _tracer is None or not _has_span():
        return
    _tracer.start_span(name, start_time=_nanoseconds(start_s)).end(_nanoseconds(end_s))


def trace_id(parent: str) -> str:
    """Return the trace of a `traceparent`, 32 hexadecimal digits; empty if that is empty."""
    return parent.split("-")[1] if parent.count("-") == 3 else ""


def _has_span() -> bool:
    """Whether there is a current span, of this process or another; only while tracing is on."""
    from opentelemetry.trace import get_current_span

    return get_current_span().get_span_context().is_valid


@contextlib.contextmanager
def _attach(parent: str) -> Iterator[None]:
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    remote = TraceContextTextMapPropagator().extract({TRACEPARENT: parent}, context.Context())
    token = context.attach(remote)
    try:
        yield
    finally:
        context.detach(token)


def _nanoseconds(time_s: float) -> int:
    return int(time_s * 1e9)
