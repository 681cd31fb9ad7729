"""Traces are recorded where a collector is named, and cost nothing where none is."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from vcpo import tracing

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
from tests.fixtures.traces import recorded_spans

REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""The example of https://www.w3.org/TR/trace-context."""
USE_EVERYTHING = """
import sys
from vcpo import tracing
tracing.start("vcpo-learner", {"vcpo.run": "r"})
with tracing.root("update", {}), tracing.child("publish"), tracing.continue_span("00-1-2-01"):
    tracing.record("score", start_s=0.0, end_s=1.0)
    here = (tracing.traceparent(), tracing.call_metadata(), tracing.parent_of_call([]))
    assert here == ("", (), "")
    assert tracing.begin("buffer", "00-1-2-01", {}) is None
assert not tracing.is_on()
tracing.stop()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def run_python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    command = [sys.executable, "-c", source]
    return subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=True, timeout=120
    )


def test_without_a_collector_nothing_of_opentelemetry_is_imported():
    assert run_python(USE_EVERYTHING).stdout.strip() == "[]"


class Collector(BaseHTTPRequestHandler):
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/traces"
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def test_a_collector_that_is_named_gets_the_spans_of_the_process():
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    handler = type("Here", (Collector,), {"bodies": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    source = """
from vcpo import tracing
tracing.start("vcpo-learner", {"vcpo.run": "countdown"})
with tracing.root("update", {"vcpo.policy_version": 3}):
    pass
tracing.stop()
"""
    run_python(source, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    (body,) = handler.bodies
    (spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {each.key: each.value.string_value for each in spans.resource.attributes}
    assert (resource["service.name"], resource["vcpo.run"]) == ("vcpo-learner", "countdown")
    assert [span.name for scope in spans.scope_spans for span in scope.spans] == ["update"]


def test_a_collector_that_is_down_delays_no_end_and_breaks_nothing():
    source = USE_EVERYTHING.split("with ")[0] + "\nwith tracing.root('a', {}):\n    pass\n"
    ended = run_python(source + "tracing.stop()", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert ended.returncode == 0


def test_packages_that_are_missing_are_a_warning_with_the_cure():
    source = """
import logging, sys
logging.basicConfig()
sys.modules["opentelemetry.sdk.trace"] = None
from vcpo import tracing
tracing.start("vcpo-learner", {})
assert not tracing.is_on()
"""
    ended = run_python(source, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert "pip install 'vcpo[tracing]'" in ended.stderr


def test_a_span_of_another_process_has_children_here_and_is_passed_on():
    with recorded_spans() as spans, tracing.continue_span(REMOTE):
        assert tracing.traceparent() == REMOTE
        with tracing.child("generate"):
            inner = tracing.traceparent()
        assert tracing.call_metadata() == (("traceparent", REMOTE),)
    (generate,) = spans.named("generate")
    assert f"{generate.parent.span_id:016x}" == REMOTE.split("-")[2]
    assert tracing.trace_id(inner) == tracing.trace_id(REMOTE) == REMOTE.split("-")[1]


def test_what_belongs_to_no_trace_is_not_recorded():
    with recorded_spans() as spans, tracing.continue_span(""), tracing.child("environment"):
        tracing.record("score", start_s=0.0, end_s=1.0)
        assert tracing.begin("buffer", "", {}) is None
        assert tracing.call_metadata() == ()
    assert spans.names() == set()


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-00", REMOTE.replace("0af", "zzz")])
def test_a_malformed_context_of_another_process_counts_as_none(parent: str):
    with recorded_spans() as spans:
        with tracing.continue_span(parent), tracing.child("generate"):
            pass
        assert tracing.begin("buffer", parent, {}) is None
    assert spans.names() == set()


def test_a_new_trace_has_no_parent_and_keeps_its_links():
    with recorded_spans() as spans, tracing.continue_span(REMOTE):
        buffered = tracing.begin("buffer", REMOTE, {"vcpo.lease": "a"})
        buffered.end()
        with tracing.root("update", {}, links=[buffered.get_span_context()]):
            tracing.record("score", start_s=10.0, end_s=12.5)
    (update,), (score,) = spans.named("update"), spans.named("score")
    assert update.parent is None
    assert [link.context.span_id for link in update.links] == [buffered.get_span_context().span_id]
    assert (score.start_time, score.end_time) == (10_000_000_000, 12_500_000_000)
    assert spans.children_of(update) == ["score"]
