"""A run as its directory records it, with everything that a report reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vcpo.records.journal import (
    METRICS_FILE,
    READER,
    EventRecord,
    Metrics,
    read_events,
    read_metrics,
)
from vcpo.report.clock import RunClock
from vcpo.spec import SpecError, VCPORun, load_run

SPEC_FILE = "spec.yaml"


class MissingRecordsError(Exception):
    """A directory lacks a file that a report needs; the message names both and the cure."""


UNREADABLE = (MissingRecordsError, SpecError)
"""Errors of a run directory that cannot be read; each message names the cure."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The spec and the records of a run."""

    name: str
    """Name in the report; unique among the runs of a comparison."""
    run: VCPORun
    metrics: Metrics
    events: tuple[EventRecord, ...] = ()

    @cached_property
    def clock(self) -> RunClock:
        """Seconds since the start of the run."""
        return RunClock(self.metrics, self.events)


def read_run(run_dir: Path, name: str | None = None) -> RecordedRun:
    """Read a run directory; `name` replaces the name in the spec.

    Raises:
        SpecError: when `spec.yaml` is missing or is not a run.
    """
    run = load_run(run_dir / SPEC_FILE)
    return RecordedRun(
        name=name or run.metadata.name,
        run=run,
        metrics=read_metrics(run_dir),
        events=read_events(run_dir),
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


def require_records(run_dir: Path) -> None:
    """Check that a directory has the records of a run.

    Raises:
        MissingRecordsError: when the spec or the journal is missing.
    """
    if not run_dir.is_dir():
        raise MissingRecordsError(f"{run_dir} is no directory; give one that `vcpo run` printed")
    for name, content in ((SPEC_FILE, "run"), (METRICS_FILE, "journal")):
        if not (run_dir / name).exists():
            raise MissingRecordsError(
                f"{run_dir} has no {name}, so no {content}; give a directory that `vcpo run`"
                " printed, or leave it out"
            )
