"""Runs studies from their files to their report: tuning, plane, claims; resumable."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from research.cells.cell import (
    Cell,
    Part,
    Selection,
    claims_cells,
    plane_cells,
    tuning_cells,
)
from research.cells.pool import run_cells
from research.cells.records import CellRecord, CellStore, model_identity
from research.progress import Clock, StudyProgress
from research.report import StudyData, write_report
from research.results import cell_frame, tuning
from research.study import StudySpec, VCPOStudy, load_study, model_directory
from vcpo.api import SpecError
from vcpo.local.processes.gpus import find_gpus
from vcpo.service.lifecycle import StartError, start_errors

RECORDS_FOLDER: Final = "records"
"""Folder beside the report with the records of each study, in a folder of its name."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line; see `python -m research --help`."""

    files: Sequence[Path]
    output: Path
    """Directory of the report and, below it, of the cells' records."""
    jobs: int
    hours: float | None
    """Time after which no cell is started; None sets no limit."""
    selection: Selection
    report_only: bool
    device: str
    """PyTorch's name of the device of every cell."""
    command: str
    """The command that the report names; options that concern this machine only are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """A study that was read, and where its model and its records are."""

    document: VCPOStudy
    model_name: str | None
    """None if the model cannot be used here, which a report does without."""
    store: CellStore

    @property
    def spec(self) -> StudySpec:
        return self.document.spec

    def records(self, cells: Iterable[Cell]) -> list[CellRecord]:
        return [record for record in map(self.store.load, cells) if record is not None]

    def cells(self) -> list[Cell]:
        """Return all cells, each once; those of the claims as far as the tuning is."""
        spec = self.spec
        claims = claims_cells(spec, self.synchronous_rates())
        cells = [*tuning_cells(spec), *plane_cells(spec), *claims]
        return list({cell.name: cell for cell in cells}.values())

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if not self.store.holds(cell)]

    def synchronous_rates(self) -> Mapping[str, float]:
        tuned = tuning(self.spec, cell_frame(self.records(tuning_cells(self.spec))))
        return {} if tuned is None else tuned.rates

    def pack_if_complete(self) -> None:
        """Gather the records in one table once every cell has been run."""
        cells = self.cells()
        if not self.missing(cells):
            self.store.pack(cells)


def run_studies(options: Options, say: Say, clock: Clock = time.monotonic) -> bool:
    """Run the missing cells of studies, write their report, and return whether no cell failed.

    After a KeyboardInterrupt it writes the report of the finished cells and raises again.

    Raises:
        StartError: when the user must correct something.
    """
    with start_errors():
        studies = [_load(file, options) for file in options.files]
    for study in studies:
        if study.model_name is None:
            name = study.document.metadata.name
            say(f"{name}: its model cannot be used here; records are taken as made")
    if options.device == "cuda" and not find_gpus():
        raise StartError("--device: cuda, but this machine shows no GPU; use cpu")
    _check_names(options, studies)
    _check_selection(studies, options.selection)
    deadline_s = math.inf if options.hours is None else clock() + 3600.0 * options.hours
    try:
        if not options.report_only:
            for study in studies:
                _Runner(
                    study=study, options=options, deadline_s=deadline_s, clock=clock, say=say
                ).run()
    finally:
        reports = [_report_data(study) for study in studies]
        begun = [data for data in reports if data.records]
        if begun:
            say(f"report: of {sum(len(data.records) for data in begun):,} cells")
            say(f"report: {write_report(begun, options.output, options.command)}")
        if not options.report_only:
            for study in studies:
                study.pack_if_complete()
    if not begun:
        raise StartError(f"--output: {options.output} holds no cell of these studies yet")
    return not any(data.failures for data in reports)


def run_and_save(model_name: str, store: CellStore, device: str, cell: Cell) -> None:
    """Run one cell and save its record; the task of one process."""
    # Imported here: the main process and a report need no tensor libraries.
    import torch

    from research.cells.experiment import run_cell

    torch.set_num_threads(1)
    store.save(cell, run_cell(cell, model_name, torch.device(device)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    """Runs the missing cells of one study."""

    study: _Study
    options: Options
    deadline_s: float
    clock: Clock
    say: Say

    def run(self) -> None:
        """Run the parts of the study in the order in which they decide each other."""
        spec, selection = self.study.spec, self.options.selection
        self._run(Part.TUNING, tuning_cells(spec, selection))
        self._run(Part.PLANE, plane_cells(spec, selection))
        if untuned := len(self.study.missing(tuning_cells(spec))):
            self.say(f"{self._title(Part.CLAIMS)}: wait for {untuned} cells of the tuning")
        else:
            rates = self.study.synchronous_rates()
            self._run(Part.CLAIMS, claims_cells(spec, rates, selection))

    def _run(self, part: Part, cells: Sequence[Cell]) -> None:
        store, jobs, device = self.study.store, self.options.jobs, self.options.device
        model_name = self.study.model_name
        assert model_name is not None  # only a report does without
        missing = self.study.missing(cells)
        progress = StudyProgress(
            self._title(part),
            total=len(cells),
            kept=len(cells) - len(missing),
            jobs=jobs,
            clock=self.clock,
        )
        self.say(progress.opening_line())
        in_time = takewhile(lambda _: self.clock() < self.deadline_s, missing)
        task = functools.partial(run_and_save, model_name, store, device)
        with closing(run_cells(in_time, task, jobs=jobs)) as outcomes:
            for outcome in outcomes:
                if outcome.error is not None:
                    store.save_error(outcome.cell, outcome.error)
                self.say(progress.outcome_line(outcome))
        if progress.num_left > 0:
            self.say(progress.closing_line())

    def _title(self, part: Part) -> str:
        return f"{self.study.document.metadata.name} {part}"


def _load(file: Path, options: Options) -> _Study:
    document = load_study(file)
    model_name = _model_name(document, file, options)
    # Processes of cells inherit the path; model code beside the file is imported from there.
    sys.path.insert(0, str(file.parent.resolve()))
    folder = options.output / RECORDS_FOLDER / document.metadata.name
    identity = None
    if model_name is not None:
        identity = model_identity(model_name, document.spec.run.model.revision)
    return _Study(document=document, model_name=model_name, store=CellStore(folder, model=identity))


def _model_name(document: VCPOStudy, file: Path, options: Options) -> str | None:
    try:
        return model_directory(document, file)
    except SpecError:
        if options.report_only:  # some models are in no repository
            return None
        raise


def _report_data(study: _Study) -> StudyData:
    """Load all records of a study, also those of cells outside the selection."""
    cells = study.cells()
    errors = {cell.name: study.store.error(cell) for cell in cells}
    failures = {name: error for name, error in errors.items() if error is not None}
    return StudyData(study=study.document, records=study.records(cells), failures=failures)


def _check_names(options: Options, studies: Sequence[_Study]) -> None:
    files: dict[str, Path] = {}
    for file, study in zip(options.files, studies, strict=True):
        name = study.document.metadata.name
        if name in files:
            raise StartError(
                f"{file}: metadata.name {name!r} is that of {files[name]} too; give it its own"
            )
        files[name] = file


def _check_selection(studies: Sequence[_Study], selection: Selection) -> None:
    names = {method.name for study in studies for method in study.spec.methods}
    for name in sorted((selection.methods or set()) - names):
        raise StartError(f"--only: {name!r} is no method of the study; it has {sorted(names)}")
    lags = {
        lag
        for study in studies
        for part in (study.spec, study.spec.claims)
        if part is not None
        for lag in part.lags
    }
    for lag in sorted((selection.lags or set()) - lags):
        raise StartError(f"--lags: {lag} is no lag of the study; it has {sorted(lags)}")
