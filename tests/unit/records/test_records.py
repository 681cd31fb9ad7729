"""What the step record declares can be found where it says."""

from __future__ import annotations

from dataclasses import fields

from tests.fixtures.samples import make_sample
from vcpo.algo.health.diagnostics import BatchDiagnostics
from vcpo.metrics.step_gauges import GAUGES
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
    file.write_bytes(first[:-9] + b"\xff\n" + second + b'{"prompt": "of another version"}\n{"pro')
    assert [each.reward for each in read_samples(tmp_path, [1, 2])] == [0.0]


def test_some_are_chosen_from_the_smallest_reward_to_the_largest():
    assert evenly_by_reward("dacbe", [3, 0, 2, 1, 4], 3) == ["a", "c", "e"]
    assert evenly_by_reward("ab", [1, 0], 8) == ["b", "a"]
