"""Selection of the other processes' events for the terminal."""

from __future__ import annotations

from collections import Counter

from vcpo.control.limit_change import ChangeKind
from vcpo.records.journal import EventRecord, EventTail

_SHOWN_EACH = 3
_ALWAYS_SHOWN = {ChangeKind.THROTTLED}
"""Kinds that are rare, because a window of steps lies between two, and that matter each time."""


class EventFeed:
    """Selects the events of `tail` to show, without those of `own_source`.

    Of each kind it selects the first three, then the 10th, the 100th and so on with the count, so
    that an event per step does not scroll everything else away. A throttle is always shown.
    """

    def __init__(self, tail: EventTail, *, own_source: str) -> None:
        self._tail = tail
        self._own_source = own_source
        self._seen: Counter[tuple[str, str]] = Counter()

    def new_lines(self) -> list[str]:
        """Return the lines to show of the events since the last call."""
        lines = []
        for event in self._tail.read():
            if event.source == self._own_source:
                continue
            kind = (event.source, event.kind)
            self._seen[kind] += 1
            if event.kind in _ALWAYS_SHOWN:
                lines.append(_line(event, 1))
            elif is_shown(self._seen[kind]):
                lines.append(_line(event, self._seen[kind]))
        return lines


def is_shown(number: int) -> bool:
    """Return whether the event with this number within its kind, from 1, is shown."""
    return number <= _SHOWN_EACH or number == 10 ** (len(str(number)) - 1)


def _line(event: EventRecord, number: int) -> str:
    counted = f" ({number:,} of these so far)" if number > _SHOWN_EACH else ""
    return f"{event.kind}: {event.message}{counted}"
