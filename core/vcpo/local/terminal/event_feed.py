"""Events that the run's other processes write, for the screen: new ones, repeated ones counted."""

from __future__ import annotations

from collections import Counter

from vcpo.records.journal import EventRecord, EventTail

_SHOWN_EACH = 3


class EventFeed:
    """What to show of the events that `tail` brings, apart from those of `own_source`.

    Of each kind the first few are shown, then every tenth, hundredth and so on with its number, so
    that an event per step does not scroll everything else away.
    """

    def __init__(self, tail: EventTail, *, own_source: str) -> None:
        self._tail = tail
        self._own_source = own_source
        self._seen: Counter[tuple[str, str]] = Counter()

    def news(self) -> list[str]:
        """Lines to show, of what was written since the last call."""
        lines = []
        for event in self._tail.read():
            if event.source == self._own_source:
                continue
            kind = (event.source, event.kind)
            self._seen[kind] += 1
            if is_worth_showing(self._seen[kind]):
                lines.append(_line(event, self._seen[kind]))
        return lines


def is_worth_showing(number: int) -> bool:
    """Whether the event of this number, counted from 1 within its kind, is shown."""
    return number <= _SHOWN_EACH or number == 10 ** (len(str(number)) - 1)


def _line(event: EventRecord, number: int) -> str:
    counted = f" ({number:,} of these so far)" if number > _SHOWN_EACH else ""
    return f"{event.kind}: {event.message}{counted}"
