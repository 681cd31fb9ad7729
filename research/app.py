"""Runs studies from their files to their report: tuning, plane, claims; resumable."""

import functools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from research.cells.cell import Cell, claims_cells, plane_cells, tuning_cells
from research.cells.pool import run_cells
from research.cells.records import CellRecord, CellStore, model_identity
from research.claims import check, facts_of
from research.report import StudyData, report_texts, write_report
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
    def name(self) -> str:
        return self.document.metadata.name

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

    def report_data(self) -> StudyData:
        cells = self.cells()
        errors = {cell.name: self.store.error(cell) for cell in cells}
        failures = {name: error for name, error in errors.items() if error is not None}
        return StudyData(study=self.document, records=self.records(cells), failures=failures)

    def run(self, options: Options, say: Say) -> None:
        """Run the missing cells of the parts, in the order in which they decide each other."""
        spec = self.spec
        self._run_part("tuning", tuning_cells(spec), options, say)
        self._run_part("plane", plane_cells(spec), options, say)
        if untuned := len(self.missing(tuning_cells(spec))):
            say(f"{self.name} claims: wait for {untuned} cells of the tuning")
        else:
            self._run_part("claims", claims_cells(spec, self.synchronous_rates()), options, say)
        if not self.missing(cells := self.cells()):
            self.store.pack(cells)

    def _run_part(self, part: str, cells: Sequence[Cell], options: Options, say: Say) -> None:
        assert self.model_name is not None  # only a report does without
        missing = self.missing(cells)
        task = functools.partial(run_and_save, self.model_name, self.store, options.device)
        with closing(run_cells(missing, task, jobs=options.jobs)) as outcomes:
            for ended, outcome in enumerate(outcomes, len(cells) - len(missing) + 1):
                line = f"{self.name} {part}: {ended}/{len(cells)} cells  {outcome.cell.name}"
                if outcome.error is not None:
                    self.store.save_error(outcome.cell, outcome.error)
                    line += f" FAILED\n{outcome.error.rstrip()}"
                say(line)


def run_studies(options: Options, say: Say) -> bool:
    """Run the missing cells of studies, write their report, and return whether no cell failed.

    After a KeyboardInterrupt it writes the report of the finished cells and raises again.

    Raises:
        StartError: when the user must correct something.
    """
    with start_errors():
        studies = [
            _load(file, options.output, is_report=options.report_only) for file in options.files
        ]
    for name, times in Counter(study.name for study in studies).items():
        if times > 1:
            raise StartError(
                f"metadata.name: {name!r} is that of {times} files; rename all but one"
            )
    for study in studies:
        if study.model_name is None:
            say(f"{study.name}: its model cannot be used here; records are taken as made")
    if options.device == "cuda" and not find_gpus():
        raise StartError("--device: cuda, but this machine shows no GPU; use cpu")
    try:
        for study in () if options.report_only else studies:
            study.run(options, say)
    finally:
        reports = [study.report_data() for study in studies]
        begun = [data for data in reports if data.records]
        if begun:
            say(f"report: of {sum(len(data.records) for data in begun):,} cells")
            say(f"report: {write_report(begun, options.output, options.command)}")
    if not begun:
        raise StartError(f"--output: {options.output} holds no cell of these studies yet")
    return not any(data.failures for data in reports)


def check_pages(root: Path, say: Say) -> bool:
    """Return whether README and the results page have the numbers that the records give."""
    published = root / "research"
    command = json.loads((published / "results.json").read_text(encoding="utf-8"))["command"]
    files = [root / file for file in shlex.split(command)[3:-2]]
    studies = [_load(file, published, is_report=True).report_data() for file in files]
    texts = report_texts(studies, command)
    numbers, problems = check(root, facts_of(json.loads(texts["results.json"])))
    for name, text in texts.items():
        if text != (published / name).read_text(encoding="utf-8"):
            problems.append(f"research/{name}: of other records; run {command} --report-only")
    for each in (*problems, json.dumps({"numbers": numbers, "differ": len(problems)})):
        say(each)
    return not problems


def run_and_save(model_name: str, store: CellStore, device: str, cell: Cell) -> None:
    """Run one cell and save its record; the task of one process."""
    # Imported here: the main process and a report need no tensor libraries.
    import torch

    from research.cells.experiment import run_cell

    torch.set_num_threads(1)
    store.save(cell, run_cell(cell, model_name, torch.device(device)))


def _load(file: Path, output: Path, *, is_report: bool) -> _Study:
    document = load_study(file)
    name: str | None = None  # some models are in no repository
    identity: str | None = None
    try:
        name = model_directory(document, file)
        identity = model_identity(name, document.spec.run.model.revision)
    except SpecError:
        if not is_report:
            raise
    # Processes of cells inherit the path; model code beside the file is imported from there.
    sys.path.insert(0, str(file.parent.resolve()))
    folder = output / RECORDS_FOLDER / document.metadata.name
    return _Study(document=document, model_name=name, store=CellStore(folder, model=identity))
