"""A line chart as inline SVG: pure functions from data to text.

Colors, fonts and line widths are not here: the elements carry classes (`line`, `reference`,
`ink-main`...) which the page's style sheet paints, so that light, dark and paper differ only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import chain

from vcpo.report.axis import Axis, round_ticks, widened
from vcpo.report.numbers import compact
from vcpo.report.series import Points, decimate, runs

MAX_POINTS = 500
"""Points drawn of one series; there are no more pixels."""

_MOST_LARGE_DOTS = 60


class Ink(StrEnum):
    """Color of a series, named by its part: the style sheet knows the shade."""

    MAIN = "ink-main"
    SECOND = "ink-second"
    THIRD = "ink-third"
    LIMIT = "ink-limit"


class Style(StrEnum):
    """How a series is drawn."""

    LINE = "line"
    RAW = "raw"
    """Faint line under its smoothed version."""
    THIN = "thin"
    """Line of secondary interest."""
    DOTS = "dots"
    """Few points, each one marked, with a thin line between."""
    REFERENCE = "reference"
    """Dashed line to compare the others with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of a chart."""

    label: str
    points: Points
    ink: Ink = Ink.MAIN
    style: Style = Style.LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one step, shown on the lower edge."""

    step: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The horizontal axis, shared by all charts of a run so that steps stand above each other."""

    first_step: int
    last_step: int
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows; how large is up to `draw`."""

    name: str
    """Identifier in the page, e.g. `ess`."""
    title: str
    unit: str
    """Of the vertical axis, in words."""
    caption: str
    """How to read it, one sentence."""
    series: tuple[Series, ...]
    horizon: Horizon
    y_low: float | None = None
    """Least value on the vertical axis; None fits the data."""
    y_high: float | None = None
    whole_y: bool = False
    """Whether only whole numbers may stand on the vertical axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Pixels of a drawing and of the margins around its plot area."""

    width: int = 560
    height: int = 232
    left: int = 46
    right: int = 12
    top: int = 10
    bottom: int = 26
    y_intervals: int = 6
    """Intervals between ticks at most, on the vertical axis."""


FULL = Size()
SMALL = Size(width=280, height=122, left=40, y_intervals=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The two axes of a drawing."""

    x: Axis
    y: Axis


def draw(chart: Chart, size: Size = FULL) -> str:
    """Draw a chart; the result is an `<svg>` element that needs nothing from outside."""
    frame = frame_of(chart, size)
    parts = [
        *_grid(frame, size),
        *chain.from_iterable(_marks(series, frame) for series in chart.series),
        *_happenings(chart.horizon.marks, frame),
    ]
    if not _values(chart):
        middle = (frame.x.pixel_low + frame.x.pixel_high) / 2, size.height / 2
        parts.append(_text("empty", *middle, "no data yet"))
    parts.append(_cursor(frame))
    label = escape(f"{chart.title}, {chart.unit}. {chart.caption}", quote=True)
    box = f'viewBox="0 0 {size.width} {size.height}"'
    return f'<svg {box} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def frame_of(chart: Chart, size: Size = FULL) -> Frame:
    """Lay the axes: round ticks, ranges that hold all the data, whole steps below."""
    x_low, x_high = _x_range(chart.horizon)
    y_low, y_high = _y_range(chart)
    return Frame(
        x=Axis(
            low=x_low,
            high=x_high,
            ticks=round_ticks(x_low, x_high, about=size.width // 80, whole=True),
            pixel_low=size.left,
            pixel_high=size.width - size.right,
        ),
        y=Axis(
            low=y_low,
            high=y_high,
            ticks=round_ticks(y_low, y_high, about=size.y_intervals, whole=chart.whole_y),
            pixel_low=size.height - size.bottom,
            pixel_high=size.top,
        ),
    )


def _x_range(horizon: Horizon) -> tuple[float, float]:
    if horizon.first_step < horizon.last_step:
        return horizon.first_step, horizon.last_step
    return widened(horizon.first_step, horizon.last_step)


def _y_range(chart: Chart) -> tuple[float, float]:
    values = _values(chart) or [0.0, 1.0]
    low = min(values) if chart.y_low is None else chart.y_low
    high = max(values) if chart.y_high is None else chart.y_high
    padded_low, padded_high = widened(low, high)
    return (
        padded_low if chart.y_low is None else chart.y_low,
        padded_high if chart.y_high is None else chart.y_high,
    )


def _values(chart: Chart) -> list[float]:
    curves = chain.from_iterable(series.points for series in chart.series)
    return [point.y for point in curves if point.y is not None]


def _grid(frame: Frame, size: Size) -> list[str]:
    left, right = frame.x.pixel_low, frame.x.pixel_high
    floor = frame.y.pixel_low
    parts = []
    for value in frame.y.ticks:
        y = frame.y.pixel(value)
        parts.append(f'<path class="grid" d="M{left} {y}H{right}"/>')
        parts.append(_text("y-tick", left - 7, y + 3.5, compact(value)))
    parts.append(f'<path class="axis" d="M{left} {floor}H{right}"/>')
    below = size.height - 9
    steps = (_text("x-tick", frame.x.pixel(x), below, compact(x)) for x in frame.x.ticks)
    return [*parts, *steps]


def _marks(series: Series, frame: Frame) -> list[str]:
    curve = decimate(series.points, limit=MAX_POINTS)
    stretches = [
        [(frame.x.pixel(x), frame.y.pixel(y)) for x, y in stretch] for stretch in runs(curve)
    ]
    path = "".join(_path(stretch) for stretch in stretches)
    parts = [f'<path class="{series.style} {series.ink}" d="{path}"/>'] if path else []
    if series.style is Style.DOTS:
        spots = list(chain.from_iterable(stretches))
        radius = 3 if len(spots) <= _MOST_LARGE_DOTS else 2
        parts += [
            f'<circle class="{series.ink}" cx="{x:g}" cy="{y:g}" r="{radius}"/>' for x, y in spots
        ]
    return parts


def _path(stretch: Sequence[tuple[float, float]]) -> str:
    """Join pixels by lines; a lone one becomes a dot, thanks to round line ends."""
    start, *rest = [f"{x:g} {y:g}" for x, y in stretch]
    return f"M{start}" + ("L" + " ".join(rest) if rest else "h0")


def _happenings(marks: Sequence[Mark], frame: Frame) -> list[str]:
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


def _text(name: str, x: float, y: float, words: str) -> str:
    return f'<text class="{name}" x="{x:g}" y="{y:g}">{escape(words)}</text>'
