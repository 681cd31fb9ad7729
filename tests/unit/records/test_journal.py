"""The journal: every record that was written is read, after any interruption."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.records import EVALUATION, STEP
from vcpo.records.journal import (
    EVENTS_FILE,
    JOURNAL_DAMAGED,
    METRICS_FILE,
    EventRecord,
    Journal,
    read_events,
    read_metrics,
)
from vcpo.records.step_record import StepRecord

EVENT = EventRecord(time_unix_s=1001.0, source="host", kind="WorkerLost", message="main-0: 9\nü")


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path)


def break_off(path: Path) -> None:
    """Leave half of a line, as a full disk does."""
    with path.open("a", encoding="utf-8") as file:
        file.write('{"type":"step","step":99,"dropped":{}')


def test_steps_and_evaluations_are_read_as_they_were_written(journal, tmp_path):
    journal.step(STEP)
    journal.evaluation(EVALUATION)
    metrics = read_metrics(tmp_path)
    assert metrics.steps == (STEP,)
    assert metrics.evaluations == (EVALUATION,)


def test_events_are_read_in_the_order_they_were_written(journal, tmp_path):
    journal.event(EVENT)
    journal.event(replace(EVENT, time_unix_s=1.0))
    assert [event.time_unix_s for event in read_events(tmp_path)] == [1001.0, 1.0]


def test_an_event_is_one_line_whatever_it_says(journal, tmp_path):
    journal.event(EVENT)
    assert (tmp_path / EVENTS_FILE).read_bytes().count(b"\n") == 1
    assert read_events(tmp_path) == (EVENT,)


def test_a_record_says_which_kind_it_is(journal, tmp_path):
    journal.step(STEP)
    written = json.loads((tmp_path / METRICS_FILE).read_text(encoding="utf-8"))
    assert written["type"] == "step"
    assert written.keys() - {"type", "crc32"} == {field.name for field in fields(StepRecord)}


def test_a_run_without_records_is_empty(tmp_path):
    assert read_metrics(tmp_path).steps == ()
    assert read_events(tmp_path) == ()


def test_a_journal_makes_its_directory(tmp_path):
    Journal(tmp_path / "runs" / "r").event(EVENT)
    assert read_events(tmp_path / "runs" / "r") == (EVENT,)


def test_of_a_step_taken_twice_the_later_record_counts(journal, tmp_path):
    for record in (STEP, replace(STEP, step=2), replace(STEP, step=2, reward_mean=0.75)):
        journal.step(record)
    rewards = [(step.step, step.reward_mean) for step in read_metrics(tmp_path).steps]
    assert rewards == [(1, 0.5), (2, 0.75)]


def test_steps_that_a_restart_took_back_are_gone_until_they_are_taken_again(journal, tmp_path):
    for number in (1, 2, 3, 4, 2):
        journal.step(replace(STEP, step=number))
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2]


def test_an_evaluation_of_parameters_that_a_restart_took_back_is_gone(journal, tmp_path):
    journal.evaluation(EVALUATION)
    for number in (1, 2, 3):
        journal.step(replace(STEP, step=number))
    journal.evaluation(replace(EVALUATION, step=3))
    journal.step(replace(STEP, step=2))
    assert [evaluation.step for evaluation in read_metrics(tmp_path).evaluations] == [0]


def test_of_an_evaluation_made_twice_the_later_record_counts(journal, tmp_path):
    journal.evaluation(EVALUATION)
    journal.evaluation(replace(EVALUATION, accuracy=0.5))
    assert [each.accuracy for each in read_metrics(tmp_path).evaluations] == [0.5]


def test_a_step_without_a_number_survives(journal, tmp_path):
    journal.step(replace(STEP, gradient_norm=math.nan, skipped="not finite"))
    (step,) = read_metrics(tmp_path).steps
    assert math.isnan(step.gradient_norm)
    assert step.skipped == "not finite"


def test_half_a_line_at_the_end_is_not_read(journal, tmp_path):
    journal.step(STEP)
    break_off(tmp_path / METRICS_FILE)
    assert read_metrics(tmp_path).steps == (STEP,)


def test_half_a_line_costs_no_record_written_after_it(journal, tmp_path):
    journal.step(STEP)
    break_off(tmp_path / METRICS_FILE)
    Journal(tmp_path).step(replace(STEP, step=2))
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2]


def test_opening_a_journal_again_changes_nothing(journal, tmp_path):
    journal.event(EVENT)
    before = (tmp_path / EVENTS_FILE).read_bytes()
    Journal(tmp_path)
    assert (tmp_path / EVENTS_FILE).read_bytes() == before


class TestDiskWithoutRoom:
    """A file that may not grow is as full as a disk; the limit is the kernel's."""

    def test_records_wait_for_room_in_their_order_and_none_is_lost(self, tmp_path):
        journal = Journal(tmp_path)
        journal.event(event("before"))
        size_bytes = (tmp_path / EVENTS_FILE).stat().st_size
        with files_of_at_most(size_bytes + 20):
            journal.event(event("first"))
            journal.event(event("second"))
            journal.step(STEP)
        assert [one.message for one in read_events(tmp_path)] == ["before"]
        journal.event(event("after"))
        events = read_events(tmp_path)
        messages = [one.message for one in events if one.kind != JOURNAL_DAMAGED]
        assert messages == ["before", "first", "second", "after"]
        assert read_metrics(tmp_path).steps == (STEP,)

    def test_an_error_that_no_room_would_cure_is_raised(self, tmp_path):
        journal = Journal(tmp_path)
        (tmp_path / EVENTS_FILE).mkdir()
        with pytest.raises(IsADirectoryError):
            journal.event(event("lost"))


def event(message):
    return EventRecord(time_unix_s=0.0, source="learner", kind="Kind", message=message)


def test_records_wait_while_the_disk_is_read_only(journal, tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as read_only:
        read_only.setattr("os.open", refuse)
        journal.event(EVENT)
    journal.event(EVENT)
    assert read_events(tmp_path) == (EVENT, EVENT)
