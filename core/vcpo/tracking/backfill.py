"""The records of a run in the order in which a sink gets them, and those that a sink lacks."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
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


def missing_records(
    records: Iterable[tuple[Record, int]], sent_steps: Collection[int]
) -> Iterator[tuple[Record, int]]:
    """Yield the records that a sink lacks, in their order.

    Of evaluations and events no sink says which it has. It gets those that came after the last step
    before its first gap, and may have some of them already.

    records: as `ordered_records` yields them.
    sent_steps: those that the sink has.
    """
    sent = frozenset(sent_steps)
    since_last: list[tuple[Record, int]] = []
    has_gap = False
    for record, step in records:
        if not isinstance(record, StepRecord):
            since_last.append((record, step))
        elif record.step not in sent:
            has_gap = True
            yield from since_last
            since_last.clear()
            yield record, step
        elif not has_gap:
            since_last.clear()
    yield from since_last
