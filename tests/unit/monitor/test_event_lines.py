"""Events on the terminal: merged by time, and followed to the end of the run."""

from __future__ import annotations

import json

from vcpo.monitor.event_lines import event_json, event_text, follow_events
from vcpo.records.journal import EventRecord
from vcpo.report.event_table import EventRow


def line(*events: EventRecord) -> str:
    return event_text(EventRow(events=events)).plain


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
    return [row.last.message for row in follow_events(source, follow=follow, sleep=source.sleep)]


def test_events_of_host_and_learner_are_merged_by_time():
    source = Script([event(2.0, "b"), event(3.0, "c"), event(1.0, "a", source="learner")])
    assert messages(source, follow=False) == ["a", "b", "c"]
    assert source.slept == 0


def test_a_followed_run_is_read_once_more_after_its_end():
    source = Script([event(1.0, "a")], [], [event(5.0, "d"), event(4.0, "c")])
    assert messages(source, follow=True) == ["a", "c", "d"]
    assert source.slept == 2


def test_a_line_has_time_source_kind_and_message():
    shown = line(event(1_700_000_000.0, "lag 8 -> 4", source="learner", kind="Throttled"))
    assert shown == "2023-11-14 22:13:20Z  learner  Throttled            lag 8 -> 4"


def test_events_that_repeat_are_one_line_that_says_how_many_and_since_when():
    source = Script([event(float(at), f"step {at}", kind="StepSkipped") for at in range(176)])
    (row,) = follow_events(source, follow=False, sleep=source.sleep)
    assert line(*row.events).endswith("step 175 (176 of these since 1970-01-01 00:00:00Z)")


def test_messages_are_in_one_column_after_the_longest_kind_too():
    lines = [line(event(0.0, "x", kind=kind)) for kind in ("Scaled", "LearningRateLowered")]
    assert len({each.index("x") for each in lines}) == 1


def test_a_message_cannot_steer_the_terminal():
    assert "\x1b" not in line(event(0.0, "\x1b]0;owned\x07"))


def test_a_script_reads_the_record():
    read = json.loads(event_json(event(1.5, "m")))
    assert read == {"time_unix_s": 1.5, "source": "host", "kind": "Scaled", "message": "m"}
