"""The records of a run in the order in which a sink would have got them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from pathlib import Path

from vcpo.records.journal import read_events, read_metrics
from vcpo.records.step_record import StepRecord
from vcpo.tracking.sink import Record

_WHEN = attrgetter("time_unix_s")


def ordered_records(run_dir: Path) -> Iterator[tuple[Record, int]]:
    """Yield each record with the steps taken when it was made, without undone history."""
    metrics = read_metrics(run_dir)
    steps: tuple[Record, ...] = metrics.steps
    others: list[Record] = sorted(chain(metrics.evaluations, read_events(run_dir)), key=_WHEN)
    step = 0
    # Steps stay in order, also if the machine's clock was set back.
    for record in heapq.merge(steps, others, key=_WHEN):
        if isinstance(record, StepRecord):
            step = record.step
        yield record, step
