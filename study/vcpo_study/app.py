"""Runs a study from its file to its report: tuning cells, grid cells, report; resumable."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vcpo.service.lifecycle import StartError, start_errors
from vcpo_study.cells.cell import Cell, Selection, grid_cells, tuning_cells
from vcpo_study.cells.pool import run_cells
from vcpo_study.cells.records import CellRecord, CellStore
from vcpo_study.progress import StudyProgress
from vcpo_study.results.report import ReportData, write_study_report
from vcpo_study.results.tuning import learning_rates, tuned_rates
from vcpo_study.study import StudySpec, VCPOStudy, load_study, model_directory

Say = Callable[[str], None]
_EVERYTHING = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line; see `python -m vcpo_study --help`."""

    file: Path
    directory: Path
    """Directory of the cells' records."""
    output: Path
    """Directory of the report."""
    jobs: int
    selection: Selection
    report_only: bool
    command: str
    """The command that the report names; options that concern this machine only are left out."""


def run_study(options: Options, say: Say) -> bool:
    """Run the missing cells of a study, write its report, and return whether no cell failed.

    After a KeyboardInterrupt it writes the report of the finished cells and raises again.

    Raises:
        StartError: when the user must correct something.
    """
    with start_errors():
        study = load_study(options.file)
        model_name = model_directory(study, options.file)
    _check_selection(study.spec, options.selection)
    # Processes of cells inherit the path; model code beside the file is imported from there.
    sys.path.insert(0, str(options.file.parent.resolve()))
    store = CellStore(options.directory)
    try:
        if not options.report_only:
            task = functools.partial(run_and_save, model_name, store)
            tuning = tuning_cells(study.spec, options.selection)
            if tuning:
                _run("tuning", tuning, store, options.jobs, task, say)
            rates = learning_rates(study.spec, tuned_rates(_records(store, tuning)))
            grid = grid_cells(study.spec, options.selection, rates)
            _run("grid", grid, store, options.jobs, task, say)
    finally:
        data = _load_data(study, store, options.command)
        if data.records:
            say(f"report: {write_study_report(data, options.output)}")
    if not data.records:
        raise StartError(f"--dir: {options.directory} holds no cell of this study's grid yet")
    return not data.failures


def run_and_save(model_name: str, store: CellStore, cell: Cell) -> None:
    """Run one cell and save its record; the task of one process."""
    # Imported here: the main process and a report need no tensor libraries.
    import torch

    from vcpo_study.cells.experiment import run_cell

    torch.set_num_threads(1)
    store.save(cell, run_cell(cell, model_name))


def _run(
    phase: str,
    cells: Sequence[Cell],
    store: CellStore,
    jobs: int,
    task: Callable[[Cell], None],
    say: Say,
) -> None:
    missing = [cell for cell in cells if not store.holds(cell)]
    kept = len(cells) - len(missing)
    progress = StudyProgress(phase, total=len(cells), kept=kept, jobs=jobs, clock=time.monotonic)
    say(progress.opening_line())
    with closing(run_cells(missing, task, jobs=jobs)) as outcomes:
        for outcome in outcomes:
            if outcome.error is not None:
                store.save_error(outcome.cell, outcome.error)
            say(progress.outcome_line(outcome))


def _load_data(study: VCPOStudy, store: CellStore, command: str) -> ReportData:
    """Load all records of the study, also those of cells outside the selection."""
    tuning = tuning_cells(study.spec, _EVERYTHING)
    tuning_records = _records(store, tuning)
    tuned = tuned_rates(tuning_records)
    grid = grid_cells(study.spec, _EVERYTHING, learning_rates(study.spec, tuned))
    errors = {cell.name: store.error(cell) for cell in [*tuning, *grid] if not store.holds(cell)}
    return ReportData(
        study=study,
        command=command,
        records=_records(store, grid),
        tuning_records=tuning_records,
        tuned=tuned,
        failures={name: error for name, error in errors.items() if error is not None},
    )


def _records(store: CellStore, cells: Iterable[Cell]) -> list[CellRecord]:
    return [record for record in map(store.load, cells) if record is not None]


def _check_selection(study: StudySpec, selection: Selection) -> None:
    names = {method.name for method in study.methods}
    for name in sorted((selection.methods or set()) - names):
        raise StartError(f"--only: {name!r} is no method of the study; it has {sorted(names)}")
    for lag in sorted((selection.lags or set()) - set(study.lags)):
        raise StartError(f"--lags: {lag} is no lag of the study; it has {list(study.lags)}")
