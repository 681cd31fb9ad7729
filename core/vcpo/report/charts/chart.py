"""What the charts of a report show. The page's script draws them; nothing here knows a pixel.

Curves are columns of a table, and all columns of a table share its rows: the steps of a run, or its
evaluations. So a row's step and time are written once. Colors and widths are not here: a curve
carries names (`line`, `reference`, `ink-1`...), and the page's style sheet has the colors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vcpo.report.charts.series import Column


class Ink(StrEnum):
    """Class of a curve; the style sheet gives its color."""

    MAIN = "ink-1"
    SECOND = "ink-2"
    THIRD = "ink-3"
    FOURTH = "ink-4"
    FIFTH = "ink-5"
    SIXTH = "ink-6"
    SEVENTH = "ink-7"
    EIGHTH = "ink-8"
    SOFT = "ink-soft"
    LIMIT = "ink-limit"


CATEGORIES = tuple(ink for ink in Ink if ink not in (Ink.SOFT, Ink.LIMIT))
"""Inks of curves that are equals, such as reasons."""


class CurveStyle(StrEnum):
    """How a curve is drawn."""

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
class Table:
    """Rows that curves share, in order."""

    name: str
    """Identifier in the page, e.g. `steps`."""
    steps: tuple[int, ...]
    times_s: tuple[float, ...]
    """Seconds since the start of the run, of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve of a chart."""

    label: str
    table: str
    values: Column
    ink: Ink = Ink.MAIN
    style: CurveStyle = CurveStyle.LINE
    is_smooth: bool = False
    """Whether the mean of rows represents them, so that thinning keeps one value of each bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A range of the vertical axis with a meaning, drawn behind the curves."""

    low: float
    high: float
    level: str
    """Class: `warn` or `critical`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """A row of cells for each category; a cell's color is its value in [0, 1]."""

    table: str
    categories: tuple[str, ...]
    """Labels of the rows, from bottom to top."""
    cells: tuple[Column, ...]
    """[categories][rows of the table]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows."""

    name: str
    """Identifier in the page, e.g. `ess`."""
    title: str
    unit: str
    """Unit of the vertical axis, in words."""
    caption: str
    """How to read it, one sentence."""
    curves: tuple[Curve, ...] = ()
    heatmap: Heatmap | None = None
    bands: tuple[Band, ...] = ()
    low: float | None = None
    """Least value on the vertical axis; None fits the data."""
    high: float | None = None
    is_whole: bool = False
    """Whether only whole numbers may stand on the vertical axis."""
    is_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event of one step, shown on the lower edge of every chart."""

    step: int
    time_s: float
    label: str
