"""The series of each run in the operator's `/metrics`, from its status."""

from __future__ import annotations

from vcpo.control import ControlDecision
from vcpo.control.conditions import ConditionType
from vcpo.metrics import OperatorMetrics
from vcpo.spec import VCPORun
from vcpo_operator.children.manifest import Kind
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import RunKey


class RunExports:
    """Exports runs as metrics, and removes those of deleted runs. One owner: the reconciler."""

    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics
        self._exported: set[RunKey] = set()

    def show(
        self, key: RunKey, run: VCPORun, status: RunStatus, decision: ControlDecision | None
    ) -> None:
        """Export a run as its status describes it.

        decision: None while the control loop does not run.
        """
        spec = run.spec
        info = (spec.model.name, spec.environment.name, spec.algorithm.method.value)
        self._metrics.run_info.labels(*key, *info).set(1)
        for condition in status.conditions:
            self._metrics.set_condition(*key, condition.type, condition.status)
        for group in status.groups:
            self._metrics.replicas.labels(*key, group.name, "desired").set(group.desired)
            self._metrics.replicas.labels(*key, group.name, "ready").set(group.ready)
        if decision is not None:
            fed = decision.condition(ConditionType.LEARNER_FED)
            self._metrics.decisions.labels(*key, decision.direction.value, fed.reason.value).inc()
        self._exported.add(key)

    def count_recreated(self, kind: Kind) -> None:
        """Count a child that somebody deleted and the operator created again."""
        self._metrics.recreated.labels(kind.kind).inc()

    def forget(self, key: RunKey) -> None:
        """Remove the series of a deleted run."""
        if key in self._exported:
            self._exported.discard(key)
            self._metrics.forget(*key)
