"""Events of a run as lines of a terminal, the host's and the learner's merged by time."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

from rich.text import Text

from vcpo.local.terminal.run_view import printable
from vcpo.monitor.local_run import LocalEvents
from vcpo.records.event_level import event_level
from vcpo.records.journal import EventRecord
from vcpo.report.event_table import EventRow, event_rows

_STYLES = {logging.ERROR: "bold red", logging.WARNING: "yellow"}
_POLL_S = 0.5


def follow_events(
    source: LocalEvents, *, follow: bool, sleep: Callable[[float], None]
) -> Iterator[EventRow]:
    """Yield the events of a run by time, repetitions folded; then, if wanted, those that come."""
    while True:
        # Asked before the last read, so that what was written meanwhile is still read.
        is_over = not follow or source.has_ended()
        yield from event_rows(by_time(source.read()))
        if is_over:
            return
        sleep(_POLL_S)


def by_time(events: Iterable[EventRecord]) -> list[EventRecord]:
    """Return events by time; those of the same time stay in their order."""
    return sorted(events, key=lambda event: event.time_unix_s)


def event_text(row: EventRow) -> Text:
    """Return an event as one line: time in UTC, source, kind, message; of several the last."""
    event, number = row.last, len(row.events)
    since = f" ({number:,} of these since {_moment(row.events[0])})" if number > 1 else ""
    return Text.assemble(
        (f"{_moment(event)}  ", "dim"),
        (f"{event.source:<8} ", "cyan"),
        (f"{event.kind:<20} ", _STYLES.get(event_level(event.kind), "bold")),
        printable(event.message) + since,
    )


def _moment(event: EventRecord) -> str:
    return datetime.fromtimestamp(event.time_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def event_json(event: EventRecord) -> str:
    """Return an event as one line of JSON."""
    return json.dumps(dataclasses.asdict(event))
