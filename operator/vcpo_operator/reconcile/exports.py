"""Exports: the series of each run in the operator's /metrics, from its status."""

from __future__ import annotations

from vcpo.control import ControlDecision
from vcpo.control.conditions import ConditionType
from vcpo.metrics import OperatorMetrics
from vcpo.spec import VCPORun
from vcpo_operator.children.manifest import Kind
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import RunKey


class RunExports:
    """Shows runs in the operator's metrics, and takes them away with the run."""

    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics
        self._shown: set[RunKey] = set()

    def show(
        self, key: RunKey, run: VCPORun, status: RunStatus, decision: ControlDecision | None
    ) -> None:
        """Show a run as its status says it."""
        spec = run.spec
        words = (spec.model.name, spec.environment.name, spec.algorithm.method.value)
        self._metrics.run_info.labels(*key, *words).set(1)
        for condition in status.conditions:
            self._metrics.set_condition(*key, condition.type, condition.status)
        for group in status.groups:
            self._metrics.replicas.labels(*key, group.name, "desired").set(group.desired)
            self._metrics.replicas.labels(*key, group.name, "ready").set(group.ready)
        if decision is not None:
            fed = decision.condition(ConditionType.LEARNER_FED)
            self._metrics.decisions.labels(*key, decision.direction.value, fed.reason.value).inc()
        self._shown.add(key)

    def recreated(self, kind: Kind) -> None:
        """Count a child that somebody deleted and that was made again."""
        self._metrics.recreated.labels(kind.kind).inc()

    def forget(self, key: RunKey) -> None:
        """Remove the series of a run that is gone."""
        if key in self._shown:
            self._shown.discard(key)
            self._metrics.forget(*key)
