"""Events with repetitions folded into one row, as a report and `vcpo events` list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vcpo.records.journal import EventRecord

MAX_EVENTS = 500
"""Largest number of events that a report lists; of more, the newest are."""

_FEWEST_FOLDED = 3
"""Shorter repetitions are not folded."""
_FOLDED_ANYWHERE = frozenset({"StepSkipped"})
"""Kinds whose events are folded also when other events lie between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One event, or several of one kind."""

    events: tuple[EventRecord, ...]
    """The events, in order of time, at least one."""

    @property
    def last(self) -> EventRecord:
        """The event that stands for all."""
        return self.events[-1]


def event_rows(events: Sequence[EventRecord]) -> tuple[EventRow, ...]:
    """Return the rows of events, oldest first.

    Three or more events in a row of one kind and source are one row. Skipped steps are one row for
    the whole run, at the place of the last of them.
    """
    rows: list[EventRow] = []
    for kind in sorted(_FOLDED_ANYWHERE):
        alike = tuple(event for event in events if event.kind == kind)
        rows += [EventRow(events=alike)] if len(alike) >= _FEWEST_FOLDED else _single(alike)
    others = [event for event in events if event.kind not in _FOLDED_ANYWHERE]
    for _, group in groupby(others, key=lambda event: (event.source, event.kind)):
        alike = tuple(group)
        rows += [EventRow(events=alike)] if len(alike) >= _FEWEST_FOLDED else _single(alike)
    places = {id(event): place for place, event in enumerate(events)}
    return tuple(sorted(rows, key=lambda row: places[id(row.last)]))


def _single(events: Sequence[EventRecord]) -> list[EventRow]:
    return [EventRow(events=(event,)) for event in events]
