"""The report's files, of two studies."""

from __future__ import annotations

import json

import pytest

from research.results.report import StudyData, write_report
from tests.fixtures.study import STUDY, record, study_document

TUNING = [
    record("vcpo", 0, [0.2, 0.8], seed=101, learning_rate=1e-4),
    record("vcpo", 0, [0.2, 0.3], seed=101, learning_rate=1e-3),
    record("plain", 0, [0.2, 0.6], seed=101, learning_rate=1e-4),
    record("plain", 0, [0.2, 0.3], seed=101, learning_rate=1e-3),
]
"""The target is 0.76; every synchronous rate is 1e-4, and plain never arrives."""
CLAIMS = [
    record("vcpo", 0, [0.0, 0.8], seed=1),
    record("vcpo", 0, [0.0, 0.8], seed=3),
    record("vcpo", 32, [0.0, 0.0, 0.8], seed=1),
    record("vcpo", 32, [0.0, 0.0, 0.8], seed=3),
    record("plain", 32, [0.6, 0.2, 0.2], seed=1),
]
PLANE = [
    record("vcpo", 32, [0.72], seed=1, learning_rate=1e-3),
    record("plain", 32, [0.8], seed=1, learning_rate=1e-3),
]


@pytest.fixture
def written(tmp_path):
    failures = {"plain-k32-lr0.001-s1": "Traceback\nValueError: no luck\n"}
    first = StudyData(study=study_document(), records=[*TUNING, *CLAIMS, *PLANE], failures=failures)
    second = StudyData(
        study=study_document(STUDY.replace("name: small", "name: other")),
        records=TUNING,
        failures={},
    )
    write_report([first, second], tmp_path, "python -m research a.yaml b.yaml --output docs")
    return tmp_path


@pytest.fixture
def numbers(written):
    return json.loads((written / "results.json").read_text())


@pytest.fixture
def document(written):
    return (written / "results.md").read_text()


def test_probabilities_of_collapse_come_with_their_interval_and_number_of_seeds(numbers):
    found = numbers["collapse_probability"]
    # No collapse of two seeds: up to 1 - 0.025^(1/2). One of one: from 0.025.
    assert found["small"]["vcpo"]["32"] == pytest.approx([0.0, 0.0, 1 - 0.025**0.5, 2])
    assert found["small"]["plain"]["32"] == pytest.approx([1.0, 0.025, 1.0, 1])
    assert found["other"] == {}


def test_safe_rates_and_the_widest_of_the_others_are_told_by_study(numbers):
    # From 0.8 at 1e-4 half of the way to 0.72 at 1e-3; without lag, by the tuning, 0.04 of the 0.5
    # down to 0.3. Plain from 0.2 to 0.8 the last 15th.
    widths = {"0": pytest.approx(0.08), "32": pytest.approx(0.5)}
    assert numbers["safe_rate_decades"]["small"]["vcpo"] == widths
    widest = numbers["best_other_safe_decades_k32"]
    assert widest == {"small": pytest.approx(1 / 15), "other": None}


def test_the_steps_of_the_subject_are_a_multiple_of_its_synchronous_steps(numbers):
    # To 0.76: step 9.5 at lag 0 and 19.5 at lag 32.
    assert numbers["steps_ratio_k32"] == {"small": pytest.approx(19.5 / 9.5), "other": None}


def test_every_table_of_a_study_is_among_the_numbers(numbers):
    small = numbers["studies"]["small"]
    assert [(row["method"], row["lag"]) for row in small["claims"]] == [
        ("vcpo", 0),
        ("vcpo", 32),
        ("plain", 32),
    ]
    assert (len(small["tuned"]), len(small["plane"]), len(small["safe"])) == (4, 8, 4)
    assert small["variance_control"] == ["vcpo"]
    assert (small["cells"], small["failed_cells"]) == (11, ["plain-k32-lr0.001-s1"])
    assert numbers["studies"]["other"]["claims"] == []


def test_the_document_names_the_command_that_made_it(document):
    assert "```\npython -m research a.yaml b.yaml --output docs\n```" in document


def test_each_study_has_its_headline(document):
    assert (
        "| small | 0.760 | 32 | vcpo | 0 of 2 (0.00 to 0.84) | plain: 1 of 1 (0.03 to 1.00) | "
        "0.50 | plain: 0.07 | 2.05 (2.05 to 2.05) |" in document
    )
    assert "| other | 0.760 | 32 | vcpo | - | - | - | - | - |" in document


def test_every_method_has_its_row_in_the_overview_also_one_that_was_not_run(document):
    assert (
        "| VCPO | 0.0001 | 0.800 ± 0.000 | 0.800 ± 0.000 | 0 of 2 (0.00 to 0.84) | "
        "2.05 (2.05 to 2.05) | 0.50 | 0.800 | 0.720 |" in document
    )
    assert (
        "| plain | 0.0001 | - | 0.200 | 1 of 1 (0.03 to 1.00) | - | 0.07 | 0.200 | 0.800 |"
        in document
    )
    _, second = document.split("## other")
    assert "| plain | 0.0001 | - | - | - | - | - | - | - |" in second


def test_the_synchronous_rate_is_bold_and_a_method_that_never_arrives_is_told(document):
    assert "| VCPO | **0.800, 9** | 0.300, - |" in document
    assert "the one that ends highest is taken: plain (0.0001).\n" in document


def test_a_claim_shows_collapse_spread_steps_dip_ess_and_weights(document):
    assert (
        "| VCPO | 0.0001 | 0 of 2 (0.00 to 0.84) | 0.800 ± 0.000 (0.800) | 10 (10 to 10) | "
        "0.00 (0.00) | 40.0 (40.0) | -4.00, 0.00, 1.00, 2.00 |" in document
    )
    assert "| plain | 0.0001 | 1 of 1 (0.03 to 1.00) | 0.200 (0.200) | - (- to -) |" in document


def test_safe_rates_show_an_end_of_the_rates_tried_the_own_target_and_the_rates_taken(document):
    head = "| method | k = 0 | k = 32 |\n|---|---|---|\n"
    row = (
        "| VCPO | >= 0.08 (0.08); own 0.08; taken 1.0e-04 to 1.0e-04 "
        "| >= 0.50 (0.50); own 0.50; taken 1.0e-04 to 1.0e-04 |"
    )
    assert head + row in document


def test_what_the_subject_gains_is_told_by_method_and_lag(document, numbers):
    # One seed of both: 0.8 and 0.2, which never arrives.
    assert "| plain | +0.600, - |" in document
    assert numbers["accuracy_gap"]["small"] == {
        "plain": {"32": [pytest.approx(0.6), None, None, 1]}
    }
    assert numbers["steps_over"]["small"] == {"plain": {"32": None}}


def test_the_best_rate_at_a_lag_is_the_one_that_ends_highest(document):
    assert "| method | k = 0 | k = 32 |\n|---|---|---|\n" in document
    assert "| VCPO | 0.800 at 0.0001 | 0.800 at 0.0001 |\n" in document
    assert "| plain | 0.600 at 0.0001 | 0.800 at 0.001 |\n" in document


def test_rates_of_the_plane_that_reach_the_target_are_bold(document):
    assert "| VCPO | **0.800** | 0.720 |" in document
    assert "| plain | 0.200 | **0.800** |" in document


def test_failed_cells_are_listed_with_their_error(document):
    assert "- `plain-k32-lr0.001-s1`: ValueError: no luck" in document


def test_every_figure_of_the_document_is_there(document, written):
    named = [part.partition(")")[0] for part in document.split("](")[1:]]
    assert len(named) == 2 * 4
    assert all((written / name).is_file() for name in named)


def test_alarms_are_judged_for_each_study_and_for_all(document, numbers):
    # One cell of the first study fell below half of its best, and none of the second.
    assert "| small | warn | 0 of 1 | 0 | 0.0% |" in document
    assert "| other | warn | 0 of 0 | - | 0.0% |" in document
    assert "| all | warn | 0 of 1 | 0 | 0.0% |" in document
    assert numbers["alarms"]["warn"]["num_collapses"] == 1
    assert numbers["studies"]["other"]["alarms"]["warn"]["num_collapses"] == 0


def test_alarms_are_judged_for_each_lag_over_all_studies(document, numbers):
    by_lag = numbers["alarms_by_lag"]
    assert {lag: found["warn"]["num_collapses"] for lag, found in by_lag.items()} == {
        "0": 0,
        "32": 1,
    }
    assert "| k = 0 | warn | 0 of 0 |" in document
    assert "| k = 32 | warn | 0 of 1 |" in document
