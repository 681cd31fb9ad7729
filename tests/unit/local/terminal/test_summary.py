"""A run's summary, worked by hand from a few records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.records import EVALUATION, STEP
from tests.fixtures.samples import make_sample
from vcpo.local.terminal.summary import Ending, answer_lines, interruption_notice, run_summary
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.records.journal import Journal
from vcpo.records.samples import write_answers


@pytest.fixture
def summary(tmp_path) -> dict[str, object]:
    journal = Journal(tmp_path)
    journal.evaluation(EVALUATION)
    skipped = {"ess_ratio": 0.0, "learning_rate_scale": 0.0, "skipped": "not finite"}
    journal.step(replace(STEP, step=1, ess_ratio=0.5, learning_rate_scale=0.75, lag_mean=0.0))
    journal.step(replace(STEP, step=2, workers=3, **skipped))
    counts = {"consumed": 112, "buffered": 4, "ranks": 2}
    updates = {"weight_updates_in_flight": 5, "adapter_swaps": 9, "merged_versions": 4}
    last = {"ess_ratio": 0.25, "lag_mean": 0.5, "lag_max": 2, **counts, **updates}
    journal.step(replace(STEP, step=3, **last))
    journal.evaluation(replace(EVALUATION, step=3, accuracy=0.875))
    return run_summary(tmp_path, Ending.COMPLETE)


def test_accuracies_are_those_of_the_first_and_last_evaluation(summary):
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.125, 0.875)


def test_skipped_steps_are_steps_and_counted(summary):
    assert (summary["steps"], summary["skipped_steps"]) == (3, 1)


def test_a_skipped_step_without_weights_says_nothing_of_ess_and_scale(summary):
    assert (summary["ess_ratio_min"], summary["learning_rate_scale_min"]) == (0.25, 0.5)


def test_lag_is_the_worst_and_the_mean_of_the_steps(summary):
    assert summary["policy_lag_max"] == 4
    assert summary["policy_lag_mean"] == pytest.approx((0.0 + 1.25 + 0.5) / 3)


def test_a_step_lasts_from_the_end_of_the_one_before_it(summary):
    assert summary["seconds_per_step"] == 0.75 + 0.125


def test_the_mismatch_is_the_mean_of_the_steps_that_measured_it(tmp_path):
    journal = Journal(tmp_path)
    for number, mismatch in enumerate([{}, {"gap_nats": 0.25}, {"gap_nats": 0.5}], start=1):
        journal.step(replace(STEP, step=number, mismatch=mismatch))
    assert run_summary(tmp_path, Ending.COMPLETE)["mismatch_nats_mean"] == 0.375


def test_the_number_of_parameters_is_that_of_the_model_that_the_run_left(summary, tmp_path):
    assert summary["model_parameters"] is None
    folder = tmp_path / "model"
    folder.mkdir()
    kind = ExportKind.MODEL
    ExportedModel(kind=kind, run="r", step=3, base_model="m", parameters=12).write(folder)
    assert run_summary(tmp_path, Ending.COMPLETE)["model_parameters"] == 12


def test_a_collapse_is_told_in_numbers(tmp_path):
    journal = Journal(tmp_path)
    journal.step(replace(STEP, warning_score=0.7))
    for step, accuracy in ((0, 0.8), (1, 0.1), (2, 0.2)):
        journal.evaluation(replace(EVALUATION, step=step, accuracy=accuracy))
    summary = run_summary(tmp_path, Ending.COLLAPSED)
    assert (summary["state"], summary["warning_score_max"]) == ("collapsed", 0.7)
    assert summary["collapse"] == {
        "measure": "accuracy",
        "step": 1,
        "share_of_best_at_end": 0.25,
        "recovered": False,
    }


def test_a_run_without_records_has_an_empty_summary(tmp_path):
    summary = run_summary(tmp_path, Ending.COMPLETE)
    assert (summary["steps"], summary["workers"], summary["accuracy_after"]) == (0, 0, None)
    assert summary["ess_ratio_min"] is summary["policy_lag_max"] is None


FIRST = make_sample(prompt="<s>\nWhat is 2 + 2?", response="five\x1b[2J", reward=0.0)
LAST = make_sample(prompt="<s>\nWhat is 2 + 2?", response="4</s>", reward=1.0)


def test_each_prompt_has_its_first_and_its_last_answer_and_a_terminal_obeys_none_of_them(tmp_path):
    for step, answers in ((0, [FIRST]), (2, []), (4, [make_sample(prompt_index=9), LAST])):
        write_answers(tmp_path, step, answers)
    assert list(answer_lines(tmp_path)) == [
        "...<s> What is 2 + 2?",
        "    before  five [2J  (reward 0)",
        "    after   4</s>  (reward 1)",
    ]


@pytest.mark.parametrize(
    ("checkpoint_step", "last_step", "resumes", "exports"),
    [
        (21, 21, "goes on from there", "the model of step 21"),
        (21, 19, "goes on from there", "the model of step 21"),  # a full disk cost two lines
        (20, 23, "takes steps 21 to 23 anew", "the model of step 20"),
        (20, 21, "takes step 21 anew", "the model of step 20"),
        (None, 3, "takes steps 1 to 3 anew", "no model"),
        (None, 0, "begins with step 1", "no model"),
    ],
)
def test_the_notice_says_what_a_resume_and_an_export_would_find(
    checkpoint_step, last_step, resumes, exports
):
    run_file, run_dir = Path("run.yaml"), Path("runs/r-001")
    first, second = interruption_notice(
        run_file, run_dir, checkpoint_step=checkpoint_step, last_step=last_step
    ).splitlines()
    assert "`vcpo run run.yaml --run-dir runs/r-001 --resume`" in first
    assert resumes in first
    assert exports in second
