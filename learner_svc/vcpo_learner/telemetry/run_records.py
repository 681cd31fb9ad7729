"""What the learner tells of its run: events and records in the journal and the log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from vcpo.records.journal import (
    EvaluationRecord,
    EventRecord,
    Journal,
    Metrics,
    read_metrics,
)
from vcpo.records.samples import Sample, write_answers, write_samples
from vcpo.records.step_record import StepRecord

_LOGGER = logging.getLogger(__name__)


class RunRecords:
    """Writes and reads the records of one run. Owner: the learner's event loop."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._journal = Journal(run_dir)

    def event(self, kind: str, message: str) -> None:
        record = EventRecord(time_unix_s=time.time(), source="learner", kind=kind, message=message)
        _LOGGER.log(record.level, "%s: %s", kind, message, extra={"event": kind})
        self._journal.event(record)

    def step(self, record: StepRecord) -> None:
        self._journal.step(record)

    def samples(self, step: int, samples: Sequence[Sample], *, total_steps: int) -> None:
        with contextlib.suppress(OSError):
            write_samples(self._run_dir, step, samples, total_steps=total_steps)

    def evaluation(self, record: EvaluationRecord, answers: Sequence[Sample]) -> None:
        with contextlib.suppress(OSError):
            write_answers(self._run_dir, record.step, answers)
        self._journal.evaluation(record)

    def read(self) -> Metrics:
        return read_metrics(self._run_dir)
