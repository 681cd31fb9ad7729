"""The data with which the page's script shows a chart's values under the pointer."""

from __future__ import annotations

from vcpo.report.chart import FULL, MAX_POINTS, Chart, Series, plot_of
from vcpo.report.plot import Size, frame_of
from vcpo.report.series import decimate

Readout = dict[str, object]
"""Plain JSON: pixels and steps of the horizontal axis, and each curve's points."""


def readout_of(chart: Chart, size: Size = FULL) -> Readout:
    """Return the data of a chart that `draw` draws with the same size."""
    axis = frame_of(plot_of(chart, size), size).x
    return {
        "low": axis.low,
        "high": axis.high,
        "left": axis.pixel_low,
        "right": axis.pixel_high,
        "width": size.width,
        "series": [_series(series) for series in chart.series],
    }


def _series(series: Series) -> Readout:
    curve = [point for point in decimate(series.points, limit=MAX_POINTS) if point.y is not None]
    return {
        "label": series.label,
        "ink": series.ink.value,
        "x": [point.x for point in curve],
        "y": [_short(point.y) for point in curve if point.y is not None],
    }


def _short(value: float) -> float:
    """Round to five significant digits, so that the page stays small."""
    return float(f"{value:.5g}")
