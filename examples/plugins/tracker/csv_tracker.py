"""A tracking service of one's own: a CSV file in the run directory, one row for each step.

tracking: {sinks: [{name: "csv_tracker:CsvTracker", parameters: {columns: [task/reward_mean]}}]}
"""

import csv
from collections.abc import Collection, Sequence
from pathlib import Path

from vcpo.api.tracking import Sink as SinkSettings
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.tracking.sink import TrackedRun, step_scalars


class CsvTracker:
    """Appends the step and the chosen numbers; a number that a step does not have stays empty.

    columns: names as `docs/watching.md` lists them.
    """

    def __init__(
        self, *, settings: SinkSettings, tracked: TrackedRun, columns: Sequence[str]
    ) -> None:
        self._path = tracked.run_dir / ("steps (copy).csv" if tracked.is_copy else "steps.csv")
        self._columns = columns
        if tracked.is_copy or not self._path.exists():
            self._write(["step", *columns], mode="w")

    def sent_steps(self) -> Collection[int]:
        """Return the steps in the file: after a restart only the others come."""
        with Path(self._path).open(encoding="utf-8", newline="") as file:
            return {int(row[0]) for row in list(csv.reader(file))[1:]}

    def step(self, record: StepRecord) -> None:
        """Append a row. A step that a restarted learner takes again has one more."""
        numbers = step_scalars(record)
        self._write([record.step, *(numbers.get(name, "") for name in self._columns)])

    def evaluation(self, record: EvaluationRecord) -> None:
        """Leave evaluations out."""

    def event(self, record: EventRecord, step: int) -> None:
        """Leave events out."""

    def close(self, *, failed: bool) -> None:
        """Do nothing: each row is in the file."""

    def _write(self, row: Sequence[object], mode: str = "a") -> None:
        with self._path.open(mode, encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(row)
