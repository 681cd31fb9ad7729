"""Studies from their files to their report, without running a cell."""

from pathlib import Path

import pytest

from research.app import Options, run_studies
from research.cells.cell import tuning_cells
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
