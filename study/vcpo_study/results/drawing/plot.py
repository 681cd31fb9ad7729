"""A plot as SVG elements: axes, grid, curves and labels. Pure functions from data to text.

Colors, fonts and line widths are not here: a curve brings its own SVG attributes, and all other
elements carry classes (`grid`, `axis`, `y-tick`, `x-tick`, `plot-title`, `x-title`) for a style
sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain

from vcpo.report.numbers import finite
from vcpo_study.results.drawing.axis import Axis

_LARGEST = 1e300
"""Largest number that is drawn; margins and sums of larger ones would overflow."""

Points = tuple[tuple[float, float | None], ...]
"""A curve, (x, y) in order of x; a y of None is a gap."""


def points(values: Sequence[tuple[float, float | None]]) -> Points:
    """Return the curve of (x, y) pairs; a y that is infinite, NaN or huge becomes a gap."""
    return tuple(
        (x, y if finite(y) is not None and abs(y or 0.0) <= _LARGEST else None) for x, y in values
    )


def runs(curve: Points) -> Iterator[list[tuple[float, float]]]:
    """Yield the stretches between gaps, as (x, y) pairs."""
    run: list[tuple[float, float]] = []
    for x, y in curve:
        if y is not None:
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisScale:
    """One axis of a plot: its range, and what stands at its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a plot, with marks if it has any."""

    points: Points
    attributes: Mapping[str, str]
    """SVG attributes of the line and of the bars."""
    dots: Mapping[str, str] = field(default_factory=dict)
    """SVG attributes of a circle at each point, `r` among them; empty draws none."""
    bars: tuple[tuple[float, float, float], ...] = ()
    """Vertical bars: x, low end, high end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What a plot shows."""

    x: AxisScale
    y: AxisScale
    curves: tuple[Curve, ...]
    title: str = ""


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
    """Largest number of intervals between ticks on the vertical axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The two axes of a drawing."""

    x: Axis
    y: Axis


def frame_of(plot: Plot, size: Size) -> Frame:
    """Return the axes that map values to pixels."""
    return Frame(
        x=Axis(
            low=plot.x.low,
            high=plot.x.high,
            pixel_low=size.left,
            pixel_high=size.width - size.right,
        ),
        y=Axis(
            low=plot.y.low,
            high=plot.y.high,
            pixel_low=size.height - size.bottom,
            pixel_high=size.top,
        ),
    )


def draw_plot(plot: Plot, size: Size) -> str:
    """Draw a plot as SVG elements, for an `<svg>` or a `<g>` around them."""
    frame = frame_of(plot, size)
    left, right, floor = frame.x.pixel_low, frame.x.pixel_high, frame.y.pixel_low
    parts = [text("plot-title", left, 16, plot.title)] if plot.title else []
    for value, label in plot.y.ticks:
        y = frame.y.pixel(value)
        parts.append(f'<path class="grid" d="M{left:g} {y:g}H{right:g}"/>')
        parts.append(text("y-tick", left - 7, y + 3.5, label))
    parts.append(f'<path class="axis" d="M{left:g} {floor:g}H{right:g}"/>')
    parts += [text("x-tick", frame.x.pixel(x), floor + 17, label) for x, label in plot.x.ticks]
    if plot.x.title:
        parts.append(text("x-title", (left + right) / 2, floor + 32, plot.x.title))
    return "".join([*parts, *(_curve(curve, frame) for curve in plot.curves)])


def text(name: str, x: float, y: float, words: str) -> str:
    """Write words at a place; `name` is their class."""
    return f'<text class="{name}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def _curve(curve: Curve, frame: Frame) -> str:
    stretches = [
        [(frame.x.pixel(x), frame.y.pixel(y)) for x, y in stretch] for stretch in runs(curve.points)
    ]
    line = "".join(map(_path, stretches))
    paint = _attributes(curve.attributes)
    parts = [f'<path {paint} d="{line}"/>'] if line else []
    for x, low, high in curve.bars:
        bottom, top = frame.y.pixel(low), frame.y.pixel(high)
        parts.append(f'<path {paint} d="M{frame.x.pixel(x):g} {bottom:g}V{top:g}"/>')
    if curve.dots:
        dot = _attributes(curve.dots)
        spots = chain.from_iterable(stretches)
        parts += [f'<circle {dot} cx="{x:g}" cy="{y:g}"/>' for x, y in spots]
    return "".join(parts)


def _path(stretch: Sequence[tuple[float, float]]) -> str:
    """Join pixels by lines; a lone one becomes a dot, because line ends are round."""
    start, *rest = [f"{x:g} {y:g}" for x, y in stretch]
    return f"M{start}" + ("L" + " ".join(rest) if rest else "h0")


def _attributes(values: Mapping[str, str]) -> str:
    return " ".join(f'{name}="{escape(value, quote=True)}"' for name, value in values.items())
