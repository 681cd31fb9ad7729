"""A sheet of small plots as one SVG file that needs nothing from outside.

A document shows the file with no style sheet of its own, so the sheet brings its colors and a white
ground.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from vcpo_study.results.drawing.plot import Curve, Size, points, text

COLORS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#8c6d00",
    "#56b4e9",
    "#444444",
    "#e69f00",
    "#882255",
    "#332288",
    "#44aa99",
    "#999933",
)
"""Most color-blind readers can tell these apart: the first eight by Okabe and Ito
(https://jfly.uni-koeln.de/color/), the others by Tol (https://sronpersonalpages.nl/~pault/)."""

FRAME_COLOR: Final = "#d55e00"
"""Of the frames in a heat map."""
PANEL: Final = Size(width=306, height=210, left=54, right=10, top=26, bottom=38)
_LEGEND_LINE = 18
_LETTER_WIDTH = 6
STYLE: Final = (
    "text{font:11px system-ui,sans-serif;fill:#333}"
    ".plot-title{font-weight:600;font-size:12px}"
    ".grid{stroke:#e4e4e4}.axis{stroke:#888}"
    "path{fill:none}.y-tick,.y-title{text-anchor:end}"
    ".x-tick,.x-title,.cell{text-anchor:middle}"
    ".on-dark{fill:#fff}.chosen{font-weight:700}"
    f".framed{{fill:none;stroke:{FRAME_COLOR};stroke-width:2}}"
)


def colored_curve(
    values: Sequence[tuple[float, float]],
    color: str,
    *,
    is_faint: bool = False,
    has_dots: bool = False,
    bars: tuple[tuple[float, float, float], ...] = (),
) -> Curve:
    """Return a curve in a color; a faint one stands behind others."""
    width, opacity = ("0.8", "0.35") if is_faint else ("1.6", "1")
    return Curve(
        points=points(values),
        attributes={"stroke": color, "opacity": opacity, "stroke-width": width},
        dots={"r": "2.5", "fill": color} if has_dots else {},
        bars=bars,
    )


def draw_sheet(
    panels: Sequence[str], legend: Sequence[tuple[str, str]], *, columns: int, about: str
) -> str:
    """Draw panels in rows, and the legend below them.

    panels: SVG elements of plots and heat maps of the size `PANEL`. legend: (label, color).
    about: what the figure shows, for those who cannot see it.
    """
    floor = -(-len(panels) // columns) * PANEL.height
    width = columns * PANEL.width
    entry_width = max((len(label) for label, _ in legend), default=0) * _LETTER_WIDTH + 48
    per_row = max(1, width // entry_width)
    height = floor + -(-len(legend) // per_row) * _LEGEND_LINE + 8
    parts = [
        f'<g transform="translate({index % columns * PANEL.width} '
        f'{index // columns * PANEL.height})">{panel}</g>'
        for index, panel in enumerate(panels)
    ]
    for index, (label, color) in enumerate(legend):
        left = index % per_row * entry_width + 12
        middle = floor + index // per_row * _LEGEND_LINE + 12
        parts.append(f'<path d="M{left} {middle}h18" stroke="{color}" stroke-width="3"/>')
        parts.append(text("label", left + 24, middle + 4, label))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about, quote=True)}">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return f"{head}<style>{STYLE}</style>{ground}{''.join(parts)}</svg>\n"
