"""Metrics that more than one part exports."""

from __future__ import annotations

from vcpo.metrics.catalogue.declare import gauge
from vcpo.metrics.metric import Label
from vcpo.records.unit import Unit

BUILD_INFO = gauge(
    "vcpo_build_info",
    "Always 1; the labels name the part and its version.",
    Label("part"),
    Label("version"),
    unit=Unit.FLAG,
)
