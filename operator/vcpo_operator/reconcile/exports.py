"""The series of each run in the operator's `/metrics`, from its status."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.control.decision import ControlDecision
from vcpo.metrics import OperatorMetrics
from vcpo.metrics.hosted_runs import HostedRun, HostedRuns, Workers
from vcpo_operator.decisions.lifecycle import startup_deadline_s
from vcpo_operator.decisions.snapshot import Snapshot
from vcpo_operator.names import RunKey
from vcpo_operator.observed.status import RunStatus, StatusCondition


class RunExports:
    """Exports runs as metrics, and removes those of deleted runs. One owner: the reconciler."""

    def __init__(self, metrics: OperatorMetrics) -> None:
        self._runs = HostedRuns(metrics)

    def show(self, snapshot: Snapshot, status: RunStatus, decision: ControlDecision | None) -> None:
        """Export a run as its next status describes it.

        decision: None while the control loop does not run.
        """
        self._runs.show(snapshot.record.key, hosted_run(snapshot, status, decision))

    def show_conditions(self, key: RunKey, conditions: Sequence[StatusCondition]) -> None:
        """Export conditions alone, of a run whose spec cannot be used."""
        self._runs.show_conditions(key, conditions)

    def forget(self, key: RunKey) -> None:
        """Remove the series of a deleted run."""
        self._runs.forget(key)


def hosted_run(
    snapshot: Snapshot, status: RunStatus, decision: ControlDecision | None
) -> HostedRun:
    """Return what the operator exports of a run."""
    signals = snapshot.signals
    return HostedRun(
        spec=snapshot.run.spec,
        labels=snapshot.run.metadata.labels,
        conditions=status.conditions,
        workers={
            group.name: Workers(desired=group.desired, ready=group.ready) for group in status.groups
        },
        decision=decision,
        lag_limit_steps=status.lag_limit_steps,
        signals_age_s=None if signals is None else signals.age_s,
        learner_restarts=status.learner.restarts,
        start_s=status.start_s,
        startup_deadline_s=startup_deadline_s(snapshot.run.spec, status),
        certificate_end_s=snapshot.observed.certificate_end_s,
    )
