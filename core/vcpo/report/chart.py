"""The charts of a run's report: each a plot over steps, as inline SVG.

Colors, fonts and line widths are not here: the elements carry classes (`line`, `reference`,
`ink-main`...) that the page's style sheet paints, so that light, dark and paper differ only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import chain

from vcpo.report.axis import round_ticks, widen
from vcpo.report.numbers import compact
from vcpo.report.plot import AxisScale, Curve, Frame, Plot, Size, draw_plot, frame_of, text
from vcpo.report.series import Points, decimate

MAX_POINTS = 500
"""Largest number of points drawn of one series; there are not more pixels."""

_MOST_LARGE_DOTS = 60


class Ink(StrEnum):
    """Class of a series; the style sheet gives its color."""

    MAIN = "ink-main"
    SECOND = "ink-second"
    THIRD = "ink-third"
    LIMIT = "ink-limit"


class SeriesStyle(StrEnum):
    """How a series is drawn."""

    LINE = "line"
    RAW = "raw"
    """Faint line under its smoothed version."""
    THIN = "thin"
    """Line of secondary interest."""
    DOTS = "dots"
    """A mark at each of few points, with a thin line between them."""
    REFERENCE = "reference"
    """Dashed line to compare the others with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of a chart."""

    label: str
    points: Points
    ink: Ink = Ink.MAIN
    style: SeriesStyle = SeriesStyle.LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event of one step, shown on the lower edge."""

    step: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The horizontal axis, which all charts of a run share so that equal steps are aligned."""

    first_step: int
    last_step: int
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows; its size is given to `draw`."""

    name: str
    """Identifier in the page, e.g. `ess`."""
    title: str
    unit: str
    """Unit of the vertical axis, in words."""
    caption: str
    """How to read it, one sentence."""
    series: tuple[Series, ...]
    horizon: Horizon
    y_low: float | None = None
    """Least value on the vertical axis; None fits the data."""
    y_high: float | None = None
    whole_y: bool = False
    """Whether only whole numbers may stand on the vertical axis."""


FULL = Size()
SMALL = Size(width=280, height=122, left=40, y_intervals=4)


def draw_chart(chart: Chart, size: Size = FULL) -> str:
    """Draw a chart as an `<svg>` element that needs only the page's style sheet."""
    plot = plot_of(chart, size)
    frame = frame_of(plot, size)
    parts = [draw_plot(plot, size), *_skips(chart.horizon.marks, frame)]
    if not _values(chart):
        middle = (frame.x.pixel_low + frame.x.pixel_high) / 2
        parts.append(text("empty", middle, size.height / 2, "no data yet"))
    parts.append(_cursor(frame))
    label = escape(f"{chart.title}, {chart.unit}. {chart.caption}", quote=True)
    box = f'viewBox="0 0 {size.width} {size.height}"'
    return f'<svg {box} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def plot_of(chart: Chart, size: Size = FULL) -> Plot:
    """Return the plot of a chart: ranges that hold all data, round ticks, whole steps on x."""
    x_low, x_high = _x_range(chart.horizon)
    y_low, y_high = _y_range(chart)
    x_ticks = round_ticks(x_low, x_high, about=size.width // 80, whole=True)
    y_ticks = round_ticks(y_low, y_high, about=size.y_intervals, whole=chart.whole_y)
    return Plot(
        x=AxisScale(low=x_low, high=x_high, ticks=tuple((x, compact(x)) for x in x_ticks)),
        y=AxisScale(low=y_low, high=y_high, ticks=tuple((y, compact(y)) for y in y_ticks)),
        curves=tuple(map(_curve, chart.series)),
    )


def _curve(series: Series) -> Curve:
    points = decimate(series.points, limit=MAX_POINTS)
    radius = "3" if len(points) <= _MOST_LARGE_DOTS else "2"
    return Curve(
        points=points,
        attributes={"class": f"{series.style} {series.ink}"},
        dots={"class": series.ink, "r": radius} if series.style is SeriesStyle.DOTS else {},
    )


def _x_range(horizon: Horizon) -> tuple[float, float]:
    if horizon.first_step < horizon.last_step:
        return horizon.first_step, horizon.last_step
    return widen(horizon.first_step, horizon.last_step)


def _y_range(chart: Chart) -> tuple[float, float]:
    values = _values(chart) or [0.0, 1.0]
    low = min(values) if chart.y_low is None else chart.y_low
    high = max(values) if chart.y_high is None else chart.y_high
    padded_low, padded_high = widen(low, high)
    return (
        padded_low if chart.y_low is None else chart.y_low,
        padded_high if chart.y_high is None else chart.y_high,
    )


def _values(chart: Chart) -> list[float]:
    curves = chain.from_iterable(series.points for series in chart.series)
    return [point.y for point in curves if point.y is not None]


def _skips(marks: Sequence[Mark], frame: Frame) -> list[str]:
    by_pixel = {frame.x.pixel(mark.step): mark.label for mark in marks}
    floor = frame.y.pixel_low
    return [
        f'<path class="mark" d="M{x:g} {floor}l-4 7h8z"><title>{escape(label)}</title></path>'
        for x, label in by_pixel.items()
    ]


def _cursor(frame: Frame) -> str:
    """Return the line that follows the pointer; the page's script moves and shows it."""
    top, floor = frame.y.pixel_high, frame.y.pixel_low
    return f'<path class="cursor" d="M0 {top}V{floor}" visibility="hidden"/>'
