"""A run as its directory records it, with everything that a report reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vcpo.algo import WarningLevel
from vcpo.api import VCPORun, load_run
from vcpo.control.signals import RunSignals
from vcpo.records.journal import (
    READER,
    EventRecord,
    Metrics,
    read_events,
    read_metrics,
)
from vcpo.records.samples import Sample, read_samples, sampled_steps
from vcpo.records.step_record import SIGNALS
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


def first_signals(run: VCPORun) -> RunSignals:
    """Return the signals of a run that has not begun."""
    return RunSignals(
        step=0,
        policy_version=0,
        batch_trajectories=run.spec.batch.trajectories,
        lag_limit_steps=run.spec.algorithm.max_policy_lag_steps,
    )


def recorded_signals(run: VCPORun, metrics: Metrics, now_s: float) -> RunSignals:
    """Return what the records of a run say of its last step.

    now_s: Unix time.
    """
    evaluations = metrics.evaluations
    signals = replace(
        first_signals(run), accuracy=evaluations[-1].accuracy if evaluations else None
    )
    if not metrics.steps:
        return signals
    last = metrics.steps[-1]
    taken = next((one for one in reversed(metrics.steps) if one.skipped is None), None)
    rate: dict[str, Any] = {
        name: None if taken is None else getattr(taken, name)
        for name, signal in SIGNALS
        if signal.is_of_update
    }
    return replace(
        signals,
        step=last.step,
        policy_version=last.step,
        ess_ratio=last.ess_ratio if last.has_weights else None,
        on_policy_ess_ratio=last.on_policy_ess_ratio,
        **rate,
        warning_score=last.warning_score,
        warning_level=WarningLevel(last.warning_level),
        reward_mean=last.reward_mean,
        cut_responses_ratio=last.cut_responses_ratio,
        equal_groups_ratio=last.equal_groups_ratio,
        prompt_tokens_mean=last.prompt_tokens_mean,
        lag_p50=last.lag_p50,
        lag_max=last.lag_max,
        lag_limit_steps=last.lag_limit_steps,
        buffered=last.buffered,
        in_flight=last.in_flight,
        tokens_per_s=last.tokens_per_s,
        since_step_s=max(0.0, now_s - last.time_unix_s),
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
