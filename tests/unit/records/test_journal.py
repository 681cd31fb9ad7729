"""The journal: every record that was written is read, after any interruption."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.records import EVALUATION, STEP
from vcpo.records.journal import (
    EVENTS_FILE,
    METRICS_FILE,
    EventRecord,
    FileTail,
    Journal,
    failure_of,
    read_events,
    read_metrics,
)

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


def test_an_event_is_one_line_whatever_it_says(journal, tmp_path):
    journal.event(EVENT)
    assert (tmp_path / EVENTS_FILE).read_bytes().count(b"\n") == 1
    assert read_events(tmp_path) == (EVENT,)


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


def test_half_a_line_costs_no_record_written_after_it(journal, tmp_path):
    journal.step(STEP)
    break_off(tmp_path / METRICS_FILE)
    Journal(tmp_path).step(replace(STEP, step=2))
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2]


STRANGE = [b"null", b"[1]", b"\xff\xfe\x00", b"", b"{", b"[" * 100_000, b'{"type":"step"}', b"{}"]


@pytest.mark.parametrize("line", STRANGE, ids=lambda line: repr(line[:20]))
def test_a_line_that_is_no_record_is_skipped(journal, tmp_path, line):
    for number in (1, 2):
        journal.step(replace(STEP, step=number))
        journal.event(EVENT)
        for name in (METRICS_FILE, EVENTS_FILE):
            with (tmp_path / name).open("ab") as file:
                file.write(line + b"\n")
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2]
    assert read_events(tmp_path) == (EVENT, EVENT)


def test_a_full_disk_costs_the_records_that_it_refuses_and_no_later_one(journal, tmp_path):
    journal.event(event("before"))
    size_bytes = (tmp_path / EVENTS_FILE).stat().st_size
    with files_of_at_most(size_bytes + 20):
        journal.event(event("refused"))
    journal.event(event("after"))
    assert [one.message for one in read_events(tmp_path)] == ["before", "after"]


def test_an_error_that_no_room_would_cure_is_raised(journal, tmp_path):
    (tmp_path / EVENTS_FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        journal.event(event("lost"))


def event(message):
    return EventRecord(time_unix_s=0.0, source="learner", kind="Kind", message=message)


@pytest.mark.parametrize(("from_start", "first"), [(True, b"old\n"), (False, b"")])
def test_whole_lines_are_read_once_from_where_the_reader_began(tmp_path, from_start, first):
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    tail = FileTail(path, from_start=from_start)
    assert tail.read() == first
    with path.open("ab") as log:
        log.write(b"new\nha")
    assert tail.read() == b"new\n"
    assert tail.read() == b""
    with path.open("ab") as log:
        log.write(b"lf\n")
    assert tail.read() == b"half\n"


def test_a_file_that_comes_later_is_read_from_its_start(tmp_path):
    tail = FileTail(tmp_path / "log", from_start=False)
    assert tail.read() == b""
    (tmp_path / "log").write_bytes(b"a\n")
    assert tail.read() == b"a\n"


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
    ],
    ids=str,
)
def test_a_run_has_failed_if_nothing_began_again_since(kinds, failure):
    events = [replace(EVENT, kind=kind, message=f"{kind} {at}") for at, kind in enumerate(kinds)]
    assert failure_of(events) == failure
