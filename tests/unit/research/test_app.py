"""Studies from their files to their report, without running a cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.app import Options, run_studies
from research.cells.cell import Selection, tuning_cells
from research.cells.records import CellStore, model_identity
from tests.fixtures.study import STUDY, record, study_document
from vcpo.service.lifecycle import StartError

TINY = Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny"
TEXT = STUDY.replace("name: tiny", f"name: {TINY}").replace(
    "steps: 40", "steps: 40\n    sampling: {maxNewTokens: 64}"
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "out" / "records" / "small"
    return CellStore(folder, model=model_identity(str(TINY), None))


def report(*files, lines=None, **changes):
    lines = [] if lines is None else lines
    options = {
        "files": files,
        "output": files[0].parent / "out",
        "jobs": 1,
        "hours": None,
        "selection": Selection(),
        "report_only": True,
        "device": "cpu",
        "command": "python -m research",
    }
    return run_studies(Options(**(options | changes)), lines.append), lines


def save(store, cell):
    place = {"seed": cell.seed, "learning_rate": cell.learning_rate}
    store.save(cell, record(cell.method, cell.lag, [0.2, 0.8], **place))


def test_a_failed_cell_is_told_and_no_success(file, store):
    first, second, *_ = tuning_cells(study_document(TEXT).spec)
    save(store, first)
    assert report(file)[0]
    store.save_error(second, "Traceback\nValueError: no luck\n")
    assert not report(file)[0]
    document = (file.parent / "out" / "results.md").read_text(encoding="utf-8")
    assert second.name in document
    assert "ValueError: no luck" in document


def test_a_report_needs_no_model_and_a_run_of_cells_does(file, store):
    save(store, tuning_cells(study_document(TEXT).spec)[0])
    file.write_text(TEXT.replace(str(TINY), "./gone"), encoding="utf-8")
    _, lines = report(file)
    assert "small: its model cannot be used here; records are taken as made" in lines
    with pytest.raises(StartError, match=r"spec\.run\.model\.name"):
        report(file, report_only=False)


def test_a_gpu_that_the_machine_does_not_have_is_refused_before_the_first_cell(file, monkeypatch):
    monkeypatch.setattr("research.app.find_gpus", lambda: ())
    with pytest.raises(StartError, match="--device: cuda, but this machine"):
        report(file, device="cuda")


def test_a_study_without_time_starts_no_cell(file):
    lines = []
    with pytest.raises(StartError, match="holds no cell of these studies yet"):
        report(file, lines=lines, report_only=False, hours=1e-9)
    assert "small plane: time is up, 20 cells left; the same command continues" in lines


def test_two_studies_of_one_name_are_refused(file):
    other = file.with_name("other.yaml")
    other.write_text(file.read_text())
    with pytest.raises(StartError, match=r"other\.yaml: metadata\.name 'small' is that of .*study"):
        report(file, other)


def test_without_any_record_there_is_nothing_to_report(file):
    with pytest.raises(StartError, match=r"--output: .*out holds no cell of these studies yet"):
        report(file)


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        (Selection(methods=frozenset({"grpo"})), "--only: 'grpo' is no method of the study"),
        (
            Selection(lags=frozenset({8})),
            r"--lags: 8 is no lag of the study; it has \[0, 32, 128\]",
        ),
    ],
)
def test_a_selection_outside_of_the_study_is_refused(file, selection, problem):
    with pytest.raises(StartError, match=problem):
        report(file, selection=selection)
