"""The series of each run of a host, from what the host knows of the run.

The gauges of a run are replaced as a whole. So a series that the run no longer has, such as that of
the method before an edit or of a rollout group that left the spec, does not stay.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from prometheus_client import Gauge

from vcpo.api import VCPORunSpec
from vcpo.control.conditions import ConditionStatus
from vcpo.control.decision import ControlDecision
from vcpo.control.limits import ChangeKind
from vcpo.metrics.host import HostMetrics
from vcpo.metrics.label_values import ReplicaState, ThrottleDirection

RunName = tuple[str, str]
"""Namespace and name of a run; the namespace of a local run is empty."""

Series = Mapping[tuple[Gauge, tuple[str, ...]], float]
"""Values by gauge and labels; without the labels `namespace` and `run`, which all of them have."""

_THROTTLES: Final = {
    ChangeKind.THROTTLED: ThrottleDirection.TIGHTEN,
    ChangeKind.RELAXED: ThrottleDirection.RELAX,
}


class ShownCondition(Protocol):
    """A condition, of the control loop or of the run's status."""

    @property
    def type(self) -> str:
        """CamelCase word."""

    @property
    def status(self) -> str:
        """`True`, `False` or `Unknown`."""

    @property
    def reason(self) -> str:
        """CamelCase word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Numbers of workers of one rollout group."""

    desired: int
    ready: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRun:
    """What a host knows of one run; None is unknown or does not apply now."""

    spec: VCPORunSpec | None = None
    """The run's spec; None if it is invalid and always was."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the run, of which `vcpo.dev/owner` and `vcpo.dev/team` name who gets its alerts."""
    conditions: Sequence[ShownCondition] = ()
    workers: Mapping[str, Workers] = field(default_factory=dict)
    decision: ControlDecision | None = None
    """The newest decision; None while the control loop does not run."""
    lag_limit_steps: int | None = None
    """The lag limit that the host has set."""
    signals_age_s: float | None = None
    learner_restarts: int = 0
    """Restarts since the run was created."""
    start_s: float | None = None
    """Unix time at which the run was started, resumed or retried last."""
    startup_deadline_s: float | None = None
    """Unix time at which the run fails unless it has taken a step."""
    certificate_end_s: float | None = None
    """Unix time at which the first certificate of its pods ends."""


def gauge_series(metrics: HostMetrics, run: HostedRun) -> Series:
    """Return every series of a run but its counters."""
    return {
        **_spec_series(metrics, run.spec, run.labels),
        **{
            (metrics.run_condition, (condition.type, status)): float(condition.status == status)
            for condition in run.conditions
            for status in ConditionStatus
        },
        **{
            (metrics.run_condition_reason, (each.type, each.reason)): 1.0 for each in run.conditions
        },
        **{
            (metrics.run_replicas, (group, state)): float(getattr(workers, state))
            for group, workers in run.workers.items()
            for state in ReplicaState
        },
        **{
            (gauge, ()): float(value)
            for gauge, value in (
                (metrics.run_lag_limit, run.lag_limit_steps),
                (metrics.run_signals_age, run.signals_age_s),
                (metrics.run_start_timestamp, run.start_s),
                (metrics.run_startup_deadline, run.startup_deadline_s),
                (metrics.run_certificate_end, run.certificate_end_s),
            )
            if value is not None
        },
    }


def _spec_series(
    metrics: HostMetrics, spec: VCPORunSpec | None, labels: Mapping[str, str]
) -> Series:
    if spec is None:
        return {}
    info = (
        spec.model.name,
        spec.environment.name,
        spec.algorithm.method.value,
        labels.get("vcpo.dev/owner", ""),
        labels.get("vcpo.dev/team", ""),
    )
    return {
        (metrics.run_info, info): 1.0,
        (metrics.run_steps, ()): float(spec.steps),
        (metrics.run_checkpoint_interval, ()): float(spec.checkpoint.every_steps),
        (metrics.run_max_policy_lag, ()): float(spec.algorithm.max_policy_lag_steps),
        (metrics.run_ess_floor, ()): spec.control.ess_floor_ratio,
    }


@dataclass(slots=True, kw_only=True)
class _Shown:
    """What is exported of one run."""

    run: HostedRun = field(default_factory=HostedRun)
    series: Series = field(default_factory=dict)
    learner_restarts: int = 0


class HostedRuns:
    """Exports the runs of one host. One owner: the host's event loop."""

    def __init__(self, metrics: HostMetrics) -> None:
        self._metrics = metrics
        self._shown: dict[RunName, _Shown] = {}

    def show(self, name: RunName, run: HostedRun) -> None:
        """Export a run, and count what its decision changes; each decision is shown once."""
        shown = self._shown.get(name)
        if shown is None:
            shown = self._shown[name] = _Shown()
            self._metrics.count_from_zero(*name)
        series = gauge_series(self._metrics, run)
        for gauge, labels in shown.series.keys() - series.keys():
            gauge.remove(*name, *labels)
        for (gauge, labels), value in series.items():
            gauge.labels(*name, *labels).set(value)
        self._count_changes(name, shown, run)
        shown.run, shown.series = run, series

    def show_conditions(self, name: RunName, conditions: Sequence[ShownCondition]) -> None:
        """Export conditions; everything else of the run stays as it was shown last."""
        shown = self._shown.get(name, _Shown())
        # Without the decision, whose changes are counted already.
        self.show(name, dataclasses.replace(shown.run, conditions=conditions, decision=None))

    def forget(self, name: RunName) -> None:
        if (shown := self._shown.pop(name, None)) is not None:
            for gauge, labels in shown.series:
                gauge.remove(*name, *labels)
            self._metrics.forget_counts(*name)

    def _count_changes(self, name: RunName, shown: _Shown, run: HostedRun) -> None:
        if run.decision is not None:
            for change in run.decision.changes:
                if (direction := _THROTTLES.get(change.kind)) is not None:
                    self._metrics.throttles.labels(*name, direction).inc()
        new_restarts = max(0, run.learner_restarts - shown.learner_restarts)
        self._metrics.learner_restarts.labels(*name).inc(new_restarts)
        shown.learner_restarts += new_restarts
