"""What more than one part exports."""

from __future__ import annotations

from vcpo.metrics.catalogue.declare import counter, gauge, histogram
from vcpo.metrics.metric import Feature, Label
from vcpo.records.step_chart import Unit
from vcpo.wire.call_meter import METHODS

BUILD_INFO = gauge(
    "vcpo_build_info",
    "Always 1; the labels name the part and its version.",
    Label("part"),
    Label("version"),
    unit=Unit.FLAG,
)

_CALL_BUCKETS = (0.01, 0.1, 1.0, 10.0)

RPC_REQUESTS = counter(
    "vcpo_rpc_requests_total",
    "Calls that a server of the run has answered or refused, by method and status code.",
    Label("method", METHODS),
    Label("code", at_most=2),
    appears_with=Feature.CALLED,
)
RPC_DURATION = histogram(
    "vcpo_rpc_duration_seconds",
    "Duration of a call, by method; Lease, Recall and GetManifest wait for something to say.",
    _CALL_BUCKETS,
    Label("method", METHODS),
    appears_with=Feature.CALLED,
)

SERVER = (RPC_REQUESTS, RPC_DURATION)
"""Metrics of a process that serves calls: a learner."""
