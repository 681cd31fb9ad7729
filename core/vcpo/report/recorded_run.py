"""A run as its directory records it, with everything that a report reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vcpo.api import VCPORun, load_run
from vcpo.records.journal import (
    READER,
    EventRecord,
    Metrics,
    read_events,
    read_metrics,
)
from vcpo.records.samples import Sample, read_samples, sampled_steps
from vcpo.report.clock import RunClock

SPEC_FILE = "spec.yaml"


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The spec and the records of a run."""

    run: VCPORun
    metrics: Metrics
    events: tuple[EventRecord, ...] = ()
    samples: tuple[Sample, ...] = ()
    """Responses of the first and the last step that kept some."""

    @cached_property
    def clock(self) -> RunClock:
        """Seconds since the start of the run."""
        return RunClock(self.metrics, self.events)


def read_run(run_dir: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        SpecError: when `spec.yaml` is missing or is not a run.
    """
    steps = sampled_steps(run_dir)
    return RecordedRun(
        run=load_run(run_dir / SPEC_FILE),
        metrics=read_metrics(run_dir),
        events=read_events(run_dir),
        samples=tuple(read_samples(run_dir, sorted({*steps[:1], *steps[-1:]}))),
    )


def damage_notice(recorded: RecordedRun) -> str | None:
    """Return a notice about lines of the records that cannot be read; None if all can."""
    notices = [each.notice for each in recorded.metrics.damaged]
    notices += [each.message for each in recorded.events if each.source == READER]
    if not notices:
        return None
    if len(notices) == 1:
        return f"A line of the records is damaged: {notices[0]}."
    return f"{len(notices):,} lines of the records are damaged; the first is {notices[0]}."
