"""Small multiples as one SVG file that stands alone: pure functions from panels to text.

A run's report draws for a page that paints it (`vcpo.report.chart`); these figures are shown by
whoever shows the document they belong to, so they bring their colors and a white ground with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from vcpo.report.axis import Axis

COLORS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#8c6d00",
    "#56b4e9",
    "#444444",
    "#e69f00",
)
"""Told apart by most color-blind readers (Okabe and Ito, https://jfly.uni-koeln.de/color/)."""

_PANEL_WIDTH, _PANEL_HEIGHT = 300, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 26, 38
_LEGEND_LINE = 18
_LETTER_WIDTH = 6
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}"
    ".title{font-weight:600;font-size:12px}"
    ".grid{stroke:#e4e4e4}.axis{stroke:#888}"
    "path,line{fill:none}.end{text-anchor:end}.mid{text-anchor:middle}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a panel."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float = 1.6
    opacity: float = 1.0
    ranges: tuple[tuple[float, float, float], ...] = ()
    """Vertical bars (x, low, high)."""
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One axis of a panel: its range and what stands at its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart."""

    title: str
    x: Scale
    y: Scale
    curves: tuple[Curve, ...]


def draw(
    panels: Sequence[Panel], legend: Sequence[tuple[str, str]], *, columns: int, about: str
) -> str:
    """Draw panels in rows, and below them the legend.

    legend: (label, color). about: what the figure shows, for those who cannot see it.
    """
    floor = -(-len(panels) // columns) * _PANEL_HEIGHT
    width = columns * _PANEL_WIDTH
    entry_width = max((len(label) for label, _ in legend), default=0) * _LETTER_WIDTH + 48
    per_row = max(1, width // entry_width)
    height = floor + -(-len(legend) // per_row) * _LEGEND_LINE + 8
    parts = [
        f'<g transform="translate({index % columns * _PANEL_WIDTH} '
        f'{index // columns * _PANEL_HEIGHT})">{_panel(panel)}</g>'
        for index, panel in enumerate(panels)
    ]
    for index, (label, color) in enumerate(legend):
        left, middle = index % per_row * entry_width, index // per_row * _LEGEND_LINE
        parts.append(_legend_entry(label, color, left + 12, floor + middle + 12))
    return _document(width, height, about, "".join(parts))


def _document(width: int, height: int, about: str, content: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about, quote=True)}">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return f"{head}<style>{_STYLE}</style>{ground}{content}</svg>\n"


def _panel(panel: Panel) -> str:
    right, floor = _PANEL_WIDTH - _RIGHT, _PANEL_HEIGHT - _BOTTOM
    x = Axis(low=panel.x.low, high=panel.x.high, ticks=(), pixel_low=_LEFT, pixel_high=right)
    y = Axis(low=panel.y.low, high=panel.y.high, ticks=(), pixel_low=floor, pixel_high=_TOP)
    parts = [_text(_LEFT, 16, panel.title, "title")]
    for value, label in panel.y.ticks:
        height = y.pixel(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {height:g}H{right}"/>')
        parts.append(_text(_LEFT - 5, height + 4, label, "end"))
    parts.append(f'<path class="axis" d="M{_LEFT} {floor}H{right}"/>')
    parts += [_text(x.pixel(value), floor + 14, label, "mid") for value, label in panel.x.ticks]
    parts.append(_text((_LEFT + right) / 2, floor + 30, panel.x.title, "mid"))
    parts += [_curve(curve, x, y) for curve in panel.curves]
    return "".join(parts)


def _curve(curve: Curve, x: Axis, y: Axis) -> str:
    spots = [(x.pixel(at), y.pixel(value)) for at, value in curve.points]
    line = " ".join(f"{across:g},{down:g}" for across, down in spots)
    paint = f'stroke="{curve.color}" opacity="{curve.opacity:g}"'
    parts = [f'<polyline points="{line}" fill="none" {paint} stroke-width="{curve.width:g}"/>']
    parts += [
        f'<path d="M{x.pixel(at):g} {y.pixel(low):g}V{y.pixel(high):g}" {paint}/>'
        for at, low, high in curve.ranges
    ]
    if curve.dots:
        parts += [f'<circle cx="{a:g}" cy="{b:g}" r="2.5" fill="{curve.color}"/>' for a, b in spots]
    return "".join(parts)


def _legend_entry(label: str, color: str, left: int, middle: int) -> str:
    line = f'<path d="M{left} {middle}h18" stroke="{color}" stroke-width="3"/>'
    return line + _text(left + 24, middle + 4, label, "")


def _text(x: float, y: float, words: str, name: str) -> str:
    return f'<text class="{name}" x="{x:g}" y="{y:g}">{escape(words)}</text>'
