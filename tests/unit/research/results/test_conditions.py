"""Conditions are judged by the interval of the default."""

from __future__ import annotations

import json

import pytest

from research.results.conditions import condition
from research.results.report import StudyData, write_report
from tests.fixtures.study import STUDY, record, study_document

CONDITION = (
    STUDY.replace("  tuning: {seeds: [101]}\n", "")
    .replace("  claims: {lags: [0, 32], seeds: [1, 2, 3]}\n", "")
    .replace("lags: [0, 32, 128]", "lags: [32]")
    .replace("learningRates: [1.0e-4, 1.0e-3]", "learningRates: [1.0e-4]")
    .replace("seeds: [1, 2]", "seeds: [3]")
    .replace("everySteps: 10", "everySteps: 10, prompts: 8")
)
"""Two methods, one cell each; an accuracy of 8 prompts."""


def judged(own: float, other: float):
    cells = [record("vcpo", 32, [0.0, own], seed=3), record("plain", 32, [0.0, other], seed=3)]
    return condition("small", study_document(CONDITION).spec, cells)


def test_the_interval_of_an_accuracy_is_the_exact_one_of_so_many_prompts():
    found = judged(1.0, 0.5)
    own = next(row for row in found.rows if row.method == "vcpo")
    # Of 8 right answers in 8: the probability p with p^8 = 0.025 is the lower end.
    assert (own.final_accuracy, own.low, own.high) == (1.0, pytest.approx(0.025 ** (1 / 8)), 1.0)
    assert own.num_seeds == 1
    assert own.on_policy_ess_ratio == 1.0


# 4 right of 8: every probability up to 0.8430 leaves a chance of 2.5 % of as few.
@pytest.mark.parametrize(("other", "is_won"), [(0.5, True), (0.84, True), (0.85, False)])
def test_a_condition_is_won_while_no_other_ends_above_the_interval(other, is_won):
    assert judged(0.5, other).is_won is is_won


def test_a_condition_with_missing_cells_is_not_judged():
    spec = study_document(CONDITION).spec
    assert condition("small", spec, [record("vcpo", 32, [0.0, 1.0], seed=3)]).is_won is None


def test_a_fall_below_half_of_the_best_accuracy_is_counted():
    spec = study_document(CONDITION).spec
    cells = [
        record("vcpo", 32, [0.0, 0.8, 0.9], seed=3),
        record("plain", 32, [0.0, 0.8, 0.3], seed=3),
    ]
    fallen = {row.method: row.num_collapsed for row in condition("small", spec, cells).rows}
    assert fallen == {"vcpo": 0, "plain": 1}


def test_what_a_lag_leaves_of_an_accuracy_is_measured_against_the_same_method_without_lag():
    spec = study_document(CONDITION.replace("lags: [32]", "lags: [0, 32]")).spec
    cells = [
        record("vcpo", 0, [0.0, 0.8], seed=3),
        record("vcpo", 32, [0.0, 0.6], seed=3),
        record("plain", 0, [0.0, 0.0], seed=3),
        record("plain", 32, [0.0, 0.5], seed=3),
    ]
    kept = {(row.method, row.lag): row.kept for row in condition("small", spec, cells).rows}
    assert kept == {
        ("vcpo", 0): None,
        ("vcpo", 32): pytest.approx(0.75),  # 0.6 of 0.8
        ("plain", 0): None,
        ("plain", 32): None,  # without lag it learnt nothing
    }


def test_the_report_counts_the_conditions_that_are_won_and_keeps_them_from_the_studies(tmp_path):
    won, lost = (
        StudyData(
            study=study_document(CONDITION.replace("name: small", f"name: {name}")),
            records=[
                record("vcpo", 32, [0.0, 0.5], seed=3),
                record("plain", 32, [0.0, other], seed=3),
            ],
            failures={},
        )
        for name, other in (("won", 0.5), ("lost", 0.9))
    )
    whole = StudyData(study=study_document(), records=[record(seed=101)], failures={})
    write_report([whole, won, lost], tmp_path, "python -m research")
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["wins"] == 1
    assert {name: each["is_won"] for name, each in numbers["conditions"].items()} == {
        "won": True,
        "lost": False,
    }
    assert list(numbers["studies"]) == ["small"]
    text = " ".join((tmp_path / "results.md").read_text().split())
    assert "1 of 2 conditions are won" in text
    assert (
        "| lost | plain | 32 | 0.0001 | **0.900** | 0.473 to 0.997 | - | 0 of 1 | - | 1.000 |"
        in text
    )


def test_a_report_without_conditions_has_no_wins(tmp_path):
    whole = StudyData(study=study_document(), records=[record(seed=101)], failures={})
    write_report([whole], tmp_path, "python -m research")
    assert "wins" not in json.loads((tmp_path / "results.json").read_text())
