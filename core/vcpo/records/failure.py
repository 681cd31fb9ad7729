"""Whether a run has failed, and why, from its events."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.records.journal import HOST_STARTED, EventRecord

RUN_FAILED = "Failed"
"""Kind of the event with which host or learner gives up; its message is the cause."""
_BEGINNINGS = {HOST_STARTED, "Resumed", "Complete", "Collapsed"}
"""Kinds of events after which an earlier failure is over."""


def failure_of(events: Sequence[EventRecord]) -> str | None:
    """Return why a run failed; None if it has not, or went on since.

    events: in the order in which they were written.
    """
    for event in reversed(events):
        if event.kind == RUN_FAILED:
            return event.message
        if event.kind in _BEGINNINGS:
            return None
    return None
