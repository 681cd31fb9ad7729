"""A heat map as SVG elements: a table of numbers, each on a ground that is darker if it is larger.

Labels and frames carry the classes `y-tick`, `x-tick`, `plot-title`, `x-title`, `y-title`, `cell`,
`on-dark`, `framed` and `chosen` for a style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vcpo_study.results.drawing.plot import Size, text

_RAMP: Final = ((247, 251, 255), (107, 174, 214), (8, 48, 107))
"""Colors of 0, of half and of the full value; in between, channels are interpolated linearly."""
_DARK_SHARE: Final = 0.55
"""Above this share of the full value, white letters are easier to read."""
_INSET: Final = 1.5

Place = tuple[int, int]
"""Row from the top and column from the left, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """What a heat map shows."""

    title: str
    x_title: str
    y_title: str
    """Stands above the labels of the rows, so it is short."""
    rows: tuple[str, ...]
    """Labels of the rows, from the top."""
    columns: tuple[str, ...]
    values: Mapping[Place, float]
    """Numbers, at least 0; a place without one stays white."""
    full: float
    """The number with the darkest color, above 0."""
    framed: frozenset[Place]
    chosen_row: int | None
    """The row whose label is bold."""


def draw_heat_map(shown: HeatMap, size: Size) -> str:
    """Draw a heat map as SVG elements, for an `<svg>` or a `<g>` around them."""
    width = (size.width - size.left - size.right) / len(shown.columns)
    height = (size.height - size.top - size.bottom) / len(shown.rows)
    floor = size.height - size.bottom
    parts = [
        text("plot-title", size.left, 16, shown.title),
        text("y-title", size.left - 7, 16, shown.y_title),
    ]
    for row, label in enumerate(shown.rows):
        name = "y-tick chosen" if row == shown.chosen_row else "y-tick"
        parts.append(text(name, size.left - 7, size.top + (row + 0.5) * height + 3.5, label))
    for column, label in enumerate(shown.columns):
        parts.append(text("x-tick", size.left + (column + 0.5) * width, floor + 17, label))
    parts.append(
        text("x-title", (size.left + size.width - size.right) / 2, floor + 32, shown.x_title)
    )
    for (row, column), value in sorted(shown.values.items()):
        left, top = size.left + column * width, size.top + row * height
        share = min(1.0, value / shown.full)
        parts.append(_rectangle(left, top, width, height, f'fill="{_color(share)}"'))
        if (row, column) in shown.framed:
            inner = left + _INSET, top + _INSET, width - 2 * _INSET, height - 2 * _INSET
            parts.append(_rectangle(*inner, 'class="framed"'))
        name = "cell on-dark" if share > _DARK_SHARE else "cell"
        parts.append(text(name, left + width / 2, top + height / 2 + 3.5, f"{value:.2f}"))
    return "".join(parts)


def _rectangle(left: float, top: float, width: float, height: float, attributes: str) -> str:
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f"<rect {place} {attributes}/>"


def _color(share: float) -> str:
    """Return the color of a share of the full value, in [0, 1]."""
    start, rest = divmod(share * (len(_RAMP) - 1), 1)
    low = _RAMP[int(start)]
    high = _RAMP[min(int(start) + 1, len(_RAMP) - 1)]
    channels = (round(a + rest * (b - a)) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{each:02x}" for each in channels)
