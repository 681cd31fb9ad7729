"""The numbers of a study, by hand on evaluations at steps 0, 10, 20 and so on, and of the pages."""

import json
import math
import shutil
from pathlib import Path
from random import Random

import pytest

from research.app import check_pages
from research.claims import check, facts_of
from research.results import (
    cell_frame,
    conditions,
    exact_interval,
    median_ratio,
)
from tests.fixtures.study import STUDY, record, study_document


def test_a_seed_that_never_arrives_may_leave_the_interval_open_above():
    # The median of three draws is 10 or infinite with a chance of 7 of 27 each.
    assert median_ratio([10.0, 20.0, math.inf], [5.0]) == (4.0, 2.0, math.inf)


@pytest.mark.parametrize(
    ("values", "references"),
    [([1.0, math.inf, math.inf], [1.0]), ([1.0], [math.inf]), ([1.0], [0.0]), ([1.0], [])],
)
def test_there_is_no_ratio_without_two_finite_medians_and_a_step(values, references):
    assert all(map(math.isnan, median_ratio(values, references)))


def test_the_interval_of_a_ratio_holds_the_true_one_about_as_often_as_it_says():
    # Ten seeds each of two exponential laws with medians in the proportion 1.5. A share of 200
    # trials scatters by 0.016; a percentile interval of ten values is a little too wide or narrow.
    draws, held = Random(7), 0
    for _ in range(200):
        values = [draws.expovariate(1.0) * 1.5 for _ in range(10)]
        _, low, high = median_ratio(values, [draws.expovariate(1.0) for _ in range(10)])
        held += low <= 1.5 <= high
    assert 0.88 <= held / 200 <= 1.0


def test_a_condition_has_the_interval_of_its_prompts_and_what_is_kept_without_lag():
    spec = study_document(STUDY.replace("everySteps: 10", "everySteps: 10, prompts: 10")).spec
    cells = cell_frame(
        [record(lag=0, accuracies=[0.8, 0.8]), record(lag=32, accuracies=[0.4, 0.4])]
    )
    fresh, stale = conditions(spec, cells).itertuples()
    assert (stale.low, stale.high) == pytest.approx(exact_interval(4, 10))
    assert (stale.kept, math.isnan(fresh.kept)) == (pytest.approx(0.5), True)


ROOT = Path(__file__).resolve().parents[3]


def test_every_number_of_the_pages_is_computed_from_the_records():
    lines = []
    assert check_pages(ROOT, lines.append), lines
    found = json.loads(lines[-1])
    assert (found["numbers"] >= 50, found["differ"]) == (True, 0)


@pytest.mark.parametrize(
    ("page", "before", "after", "problem"),
    [
        ("README.md", "0.60 ± 0.33", "0.61 ± 0.33", "does not say: | REINFORCE"),
        ("docs/results.md", "| 2 of 10 |", "| 4 of 10 |", "does not say: | sorting | 0.011"),
        ("docs/results.md", "\n\n## How", " So 9 of 9 are won.\n\n## How", "no fact: 9"),
        ("docs/results.md", "cells ran on", "ran on", "cells ran on"),
    ],
)
def test_a_number_that_is_not_of_the_records_is_told(tmp_path, page, before, after, problem):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/results.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert before in text
    (tmp_path / page).write_text(text.replace(before, after), encoding="utf-8")
    facts = facts_of(json.loads((ROOT / "research" / "results.json").read_text(encoding="utf-8")))
    _, problems = check(tmp_path, facts)
    assert any(each.startswith(page) and problem in each for each in problems)


def test_a_condition_at_two_rates_has_a_final_accuracy_for_each():
    rows = [{"method": "m", "lag": 16, "rate": rate, "final": rate * 10} for rate in (4e-4, 1.2e-4)]
    facts = facts_of({"cells": 2, "studies": {}, "conditions": {"c": rows}})
    assert (facts["c/m/16/4e-04"], facts["c/m/16/1e-04"]) == (4e-3, pytest.approx(1.2e-3))
