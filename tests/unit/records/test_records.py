"""What the step record declares can be found where it says."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.records import EVALUATION, STEP, make_sample
from vcpo.algo.health.diagnostics import BatchDiagnostics
from vcpo.metrics.step_gauges import GAUGES
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
from vcpo.records.samples import (
    FOLDER,
    evenly_by_reward,
    read_answers,
    read_samples,
    sampled_steps,
    write_answers,
    write_samples,
)
from vcpo.records.step_record import StepRecord, UpdateRecord, update_fields


def test_a_number_within_the_diagnostics_is_one_of_theirs():
    known = {each.name for each in fields(BatchDiagnostics)}
    assert {each.key for each in GAUGES if each.field == "diagnostics"} <= known


def test_a_step_holds_all_numbers_of_its_update():
    update = UpdateRecord(
        reward_mean=0.5, response_tokens_mean=12.0, on_policy_ess_ratio=0.9, skipped="low_ess"
    )
    around = dict.fromkeys(each.name for each in fields(StepRecord)) | {"step": 7}
    step = StepRecord(**{**around, **update_fields(update)})
    assert (step.step, step.reward_mean, step.skipped) == (7, 0.5, "low_ess")
    assert update_fields(step) == update_fields(update)


def test_samples_are_read_as_they_were_written(tmp_path):
    odd = "one\ntwo\u2028three\x85 \N{PILE OF POO} \ud800".encode("utf-8", "replace").decode()
    written = [make_sample(response=odd, step=1), make_sample(reward=-2.5, step=1)]
    write_samples(tmp_path, 1, written, total_steps=10)
    assert list(read_samples(tmp_path, [1])) == written


def test_a_step_that_is_taken_again_replaces_its_samples(tmp_path):
    write_samples(tmp_path, 1, [make_sample(response="before")], total_steps=10)
    write_samples(tmp_path, 1, [make_sample(response="after")], total_steps=10)
    assert [each.response for each in read_samples(tmp_path, [1])] == ["after"]


def test_the_newest_steps_the_first_and_some_between_keep_theirs(tmp_path):
    for step in range(1, 1001):
        write_samples(tmp_path, step, [make_sample(step=step)], total_steps=1000)
    between = [1, *range(10, 985, 10)]
    assert sampled_steps(tmp_path) == [*between, *range(985, 1001)]
    assert sum(1 for _ in (tmp_path / FOLDER).iterdir()) == len(between) + 16


def test_the_first_evaluation_and_the_newest_keep_their_answers(tmp_path):
    first, last = make_sample(response="four"), make_sample(response="4", step=30)
    for step, answer in ((0, first), (20, first), (40, first), (30, last)):  # after a rollback
        write_answers(tmp_path, step, [answer])
    assert read_answers(tmp_path) == [[first], [last]]
    assert sampled_steps(tmp_path) == []


def test_a_line_that_is_damaged_costs_itself_alone(tmp_path):
    write_samples(tmp_path, 1, [make_sample(), make_sample(reward=0.0)], total_steps=10)
    (file,) = (tmp_path / FOLDER).iterdir()
    first, second = file.read_bytes().splitlines(keepends=True)
    typed = [second.replace(b'"prompt":', b'"prompt": 1, "old":'), b"[" * 100_000 + b"\n"]
    lines = [first[:-9] + b"\xff\n", *typed, second, b'{"prompt": "of another version"}\n{"pro']
    file.write_bytes(b"".join(lines))
    assert [each.reward for each in read_samples(tmp_path, [1, 2])] == [0.0]


def test_some_are_chosen_from_the_smallest_reward_to_the_largest():
    assert evenly_by_reward("dacbe", [3, 0, 2, 1, 4], 3) == ["a", "c", "e"]
    assert evenly_by_reward("ab", [1, 0], 8) == ["b", "a"]


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", None), ("reward_mean", [1]), ("time_unix_s", "x"), ("time_unix_s", float("inf"))],
)
def test_a_record_with_a_value_of_another_type_is_left_out(journal, tmp_path, field, value):
    journal.step(STEP)
    path = tmp_path / METRICS_FILE
    entry = json.loads(path.read_text())
    path.write_text("".join(json.dumps(each) + "\n" for each in (entry | {field: value}, entry)))
    assert read_metrics(tmp_path).steps == (STEP,)


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


def test_a_pipe_in_place_of_the_records_is_an_empty_run(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    held = os.open(tmp_path / "metrics.jsonl", os.O_RDWR)  # or a reader would wait here
    assert read_metrics(tmp_path).steps == ()
    os.close(held)
