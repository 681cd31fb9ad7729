"""What a dashboard is, apart from the program that draws it: rows of panels, each with a question.

A board is written once, in `off_policy`, `run`, `rollout` and `operator`, and translated by
`grafana`. An id is written by hand and never reused, because alerts, runbooks and
bookmarks link to panels by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

COLUMNS: Final = 24
"""Width of a board, in units of the grid."""


class Kind(StrEnum):
    """How a panel draws the values of its queries."""

    LINES = "lines"
    STACK = "stack"
    """Areas on top of each other: parts of a whole."""
    EVENTS = "events"
    """Bars: counts of events since the last point."""
    HEATMAP = "heatmap"
    """The buckets of one histogram over time."""
    STAT = "stat"
    """Newest values, as large numbers."""
    TABLE = "table"
    """A column per query, a row per set of labels."""
    STATES = "states"
    """A coloured bar per series, by the state that its value stands for (`STATES`)."""


INSTANT: Final = frozenset({Kind.STAT, Kind.TABLE})
"""Kinds that show one moment, not a range of time."""


class AxisUnit(StrEnum):
    """Unit of an axis, by Grafana's name for it."""

    NUMBER, COUNT, SHARE = "none", "short", "percentunit"
    STEPS, VERSIONS, NATS = "suffix: steps", "suffix: versions", "suffix: nats"
    TOKENS, TOKENS_PER_SECOND, PER_SECOND = "suffix: tokens", "suffix: tokens/s", "cps"
    SECONDS, BYTES, BYTES_PER_SECOND = "s", "bytes", "Bps"


class Color(StrEnum):
    """Colours by what they say, as Grafana names them."""

    GOOD, WARNING, BAD, NEUTRAL, QUIET = "green", "orange", "red", "blue", "#8e8e8e"


STATES: Final = {
    0: ("False", Color.BAD),
    1: ("True", Color.GOOD),
    2: ("Unknown", Color.QUIET),
    3: ("Yes", Color.NEUTRAL),
}
"""Text and colour of the values of a panel of the kind `STATES`."""


class Role(StrEnum):
    """What a line means."""

    VALUE = "value"
    FAINT = "faint"
    """A noisy value behind the one that counts."""
    REFERENCE = "reference"
    """What the value is compared with, such as its limit in force."""
    LIMIT = "limit"
    """A value that may not be crossed."""


class Band(NamedTuple):
    """A colour for the values from a number on; None is the least value."""

    start: float | None
    color: Color


class Words(NamedTuple):
    """Colours of the values of a label, by a regular expression of the whole; the first counts."""

    label: str
    colors: Mapping[str, Color]


class Query(NamedTuple):
    """A PromQL expression and the name of what it returns."""

    expression: str
    """With Grafana's variables, such as `$run` and `$__rate_interval`."""
    legend: str
    """Name of the series, with labels in braces: `{{reason}}`. In a table, the column's title."""
    role: Role = Role.VALUE
    unit: AxisUnit | None = None
    """Of a table's column."""
    bands: tuple[Band, ...] = ()
    """Colours of the numbers in a table's column."""
    words: Words | None = None
    """Colours of a label that is a table's column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    id: int
    """Unique in its board and never reused; links point to it."""
    title: str
    text: str
    """How to read the picture, and what a bad one means."""
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    unit: AxisUnit = AxisUnit.NUMBER
    bands: tuple[Band, ...] = ()
    minimum: float | None = 0.0
    """Least value of the axis; None: from the data."""
    maximum: float | None = None
    is_logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels that answer one question together."""

    id: int
    question: str
    panels: tuple[Panel, ...]


def panel(number: int, title: str, text: str, *queries: Query, **settings: Any) -> Panel:
    """Return a panel of queries; settings: of its drawing, by the names of `Panel`."""
    return Panel(id=number, title=title, text=text, queries=queries, **settings)


def row(number: int, question: str, *panels: Panel) -> Row:
    """Return a row of panels."""
    return Row(id=number, question=question, panels=panels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    tags: tuple[str, ...]
    has_run: bool
    """Whether it shows the runs that the variable `run` chooses, one or several over each other."""
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)
