"""Events on the terminal: merged by time, and followed to the end of the run."""

from __future__ import annotations

import json

from vcpo.monitor.event_lines import event_json, event_text, follow_events
from vcpo.records.journal import EventRecord


def event(time_s: float, message: str = "m", **changes) -> EventRecord:
    return EventRecord(
        **{"time_unix_s": time_s, "source": "host", "kind": "Scaled", "message": message, **changes}
    )


class Script:
    """A run whose events arrive in batches, one for each read."""

    def __init__(self, *batches: list[EventRecord]) -> None:
        self.batches = list(batches)
        self.slept = 0

    def read(self) -> list[EventRecord]:
        return self.batches.pop(0)

    def has_ended(self) -> bool:
        return len(self.batches) == 1

    def sleep(self, seconds: float) -> None:
        self.slept += 1


def messages(source: Script, *, follow: bool) -> list[str]:
    return [each.message for each in follow_events(source, follow=follow, sleep=source.sleep)]


def test_events_of_host_and_learner_are_merged_by_time():
    source = Script([event(2.0, "b"), event(3.0, "c"), event(1.0, "a", source="learner")])
    assert messages(source, follow=False) == ["a", "b", "c"]
    assert source.slept == 0


def test_a_followed_run_is_read_once_more_after_its_end():
    source = Script([event(1.0, "a")], [], [event(5.0, "d"), event(4.0, "c")])
    assert messages(source, follow=True) == ["a", "c", "d"]
    assert source.slept == 2


def test_a_line_has_time_source_kind_and_message():
    line = event_text(event(1_700_000_000.0, "lag 8 -> 4", source="learner", kind="Throttled"))
    assert line.plain == "2023-11-14 22:13:20Z  learner  Throttled            lag 8 -> 4"


def test_messages_are_in_one_column_after_the_longest_kind_too():
    lines = [
        event_text(event(0.0, "x", kind=kind)).plain for kind in ("Scaled", "LearningRateLowered")
    ]
    assert len({line.index("x") for line in lines}) == 1


def test_a_message_cannot_steer_the_terminal():
    assert "\x1b" not in event_text(event(0.0, "\x1b]0;owned\x07")).plain


def test_a_script_reads_the_record():
    read = json.loads(event_json(event(1.5, "m")))
    assert read == {"time_unix_s": 1.5, "source": "host", "kind": "Scaled", "message": "m"}
