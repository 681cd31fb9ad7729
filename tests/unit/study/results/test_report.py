"""The report's files."""

from __future__ import annotations

import json

import pytest

from tests.fixtures.study import record, study_document
from vcpo_study.results.report import ReportData, write_study_report
from vcpo_study.results.tuning import tuned_rates

RECORDS = [
    record("vcpo", 0, [0.2, 0.8, 0.8, 0.8]),
    record("vcpo", 128, [0.2, 0.6, 0.6, 0.6]),
    record("plain", 0, [0.2, 0.8, 0.8, 0.8]),
    record("plain", 128, [0.2, 0.9, 0.1, 0.2]),
]
TUNING = [
    record("vcpo", 0, [0.7], seed=101, learning_rate=1e-3),
    record("vcpo", 0, [0.9], seed=101, learning_rate=1e-4),
]


@pytest.fixture
def written(tmp_path):
    data = ReportData(
        study=study_document(),
        command="vcpo study study.yaml",
        records=RECORDS,
        tuning_records=TUNING,
        tuned=tuned_rates(TUNING),
        failures={"plain-k32-lr0.001-s1": "Traceback\nValueError: no luck\n"},
    )
    write_study_report(data, tmp_path)
    return tmp_path


@pytest.fixture
def summary(written):
    return json.loads((written / "results.json").read_text())


@pytest.fixture
def document(written):
    return (written / "results.md").read_text()


def test_the_summary_is_about_the_subject(summary):
    assert summary["vcpo_k128_over_k0"] == pytest.approx(0.75)
    assert summary["steps_ratio_k32"] is None


def test_the_summary_holds_the_whole_grid(summary):
    places = [(row["method"], row["lag"], row["collapses"]) for row in summary["grid"]]
    assert places == [("vcpo", 0, 0), ("vcpo", 128, 0), ("plain", 0, 0), ("plain", 128, 1)]


def test_the_document_names_the_command_that_made_it(document):
    assert "```\nvcpo study study.yaml\n```" in document


def test_the_table_shows_spread_worst_seed_and_collapses(document):
    assert "| VCPO | 0.800 ± 0.000 (0.800) | 0.600 ± 0.000 (0.600) |" in document
    assert "0.400 ± 0.000 (0.400, 1 collapsed) |" in document


def test_the_chosen_learning_rate_is_bold_and_a_missing_one_a_dash(document):
    assert "| VCPO | **0.900** | 0.700 |" in document
    assert "| plain | - | - |" in document


def test_failed_cells_are_listed_with_their_error(document, summary):
    assert "- `plain-k32-lr0.001-s1`: ValueError: no luck" in document
    assert summary["failed_cells"] == ["plain-k32-lr0.001-s1"]


def test_every_figure_of_the_document_is_there(document, written):
    named = [part.partition(")")[0] for part in document.split("](")[1:]]
    assert len(named) == 3
    assert all((written / name).is_file() for name in named)
