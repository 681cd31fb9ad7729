"""Whether a run has failed, and why, is told by its events."""

from __future__ import annotations

import pytest

from vcpo.records.journal import EventRecord, failure_of


def events(*kinds: str) -> list[EventRecord]:
    return [
        EventRecord(
            time_unix_s=float(number),
            source="host" if kind == "Started" else "learner",
            kind=kind,
            message=f"{kind} {number}",
        )
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("kinds", "failure"),
    [
        ((), None),
        (("Started", "LearnerStarted"), None),
        (("Started", "Failed"), "Failed 1"),
        (("Started", "Failed", "LearnerRestarted", "Failed"), "Failed 3"),
        (("Started", "Failed", "Redone", "WorkerLost"), "Failed 1"),
        (("Started", "Failed", "Started"), None),
        (("Started", "Failed", "Started", "Complete"), None),
        (("Failed", "Resumed"), None),
        (("Failed", "Complete"), None),
    ],
    ids=str,
)
def test_a_run_has_failed_if_nothing_began_again_since(kinds, failure):
    assert failure_of(events(*kinds)) == failure
