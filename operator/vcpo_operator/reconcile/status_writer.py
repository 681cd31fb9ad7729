"""Writing a run's status, and posting the events that follow from it."""

import logging
from dataclasses import dataclass
from typing import Any

from vcpo.control.conditions import Condition
from vcpo.control.decision import ControlDecision
from vcpo.metrics.hosted_runs import HostedRun, HostedRuns, Workers
from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.decisions import status
from vcpo_operator.decisions.autoscale import AutoscaleDecision
from vcpo_operator.decisions.conditions import (
    ConditionInputs,
    condition_states,
    decide_no_update,
)
from vcpo_operator.decisions.events import transition_events
from vcpo_operator.decisions.lifecycle import startup_deadline_s
from vcpo_operator.decisions.snapshot import PlanResult, Snapshot, keeps_last_known_signals
from vcpo_operator.names import RunKey
from vcpo_operator.observed.records import RunRecord
from vcpo_operator.observed.status import RunStatus
from vcpo_operator.reconcile.memory import RunMemory

_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StatusWriter:
    """Writes statuses and posts events. One owner: the reconciler."""

    _executor: Executor
    _exports: HostedRuns

    async def write(
        self,
        snapshot: Snapshot,
        memory: RunMemory,
        autoscale: AutoscaleDecision | None,
        result: PlanResult,
    ) -> None:
        """Write the status that follows from a reconcile, and export it as metrics."""
        decision = autoscale.decision if autoscale else None
        memory.no_update = decide_no_update(
            snapshot.signals, snapshot.run.spec.steps, snapshot.before, memory.no_update
        )
        inputs = ConditionInputs(
            spec=snapshot.run.spec,
            verdict=snapshot.verdict,
            observed=snapshot.observed,
            decision=decision,
            has_stepped=snapshot.current.first_step_s is not None,
            signals=snapshot.signals,
            silence=snapshot.silence,
            now_s=snapshot.now_s,
            conflict=result.blocker,
            refusal=result.refusal,
            note=result.note,
            keeps_last_known_signals=keeps_last_known_signals(snapshot, memory.first_seen_s),
            before=snapshot.before,
            pending=result.pending,
            no_update=memory.no_update,
        )
        after = status.with_groups(
            snapshot.current,
            snapshot.run.spec,
            snapshot.observed,
            desired=decision.replicas if decision else {},
            now_s=snapshot.now_s,
        )
        after = status.with_learner_pods(after, snapshot.run.spec, snapshot.observed)
        after = status.with_decision(after, decision, autoscale.state if autoscale else None)
        generation = snapshot.record.generation
        after = status.with_conditions(
            after, condition_states(inputs), generation=generation, now_s=snapshot.now_s
        )
        self._exports.show(snapshot.record.key, hosted_run(snapshot, after, decision))
        await self._write_if_needed(snapshot.record, memory, snapshot.before, after, snapshot.now_s)

    async def write_conditions(
        self,
        record: RunRecord,
        memory: RunMemory,
        states: tuple[Condition, ...],
        *,
        generation: int,
        now_s: float,
    ) -> None:
        before = memory.last_known_status(record)
        after = status.with_conditions(before, states, generation=generation, now_s=now_s)
        self._exports.show_conditions(record.key, after.conditions)
        await self._write_if_needed(record, memory, before, after, now_s)

    async def post_event(self, key: RunKey, event: dict[str, Any]) -> None:
        """Post and log an event; an error is only logged, since the status says the same."""
        level = logging.WARNING if event["type"] == "Warning" else logging.INFO
        extra = {"event": event["reason"]}
        _LOGGER.log(level, "%s: %s: %s", key, event["reason"], event["message"], extra=extra)
        try:
            await self._executor.post_event(key, event)
        except ApiError as error:
            _LOGGER.info("%s: cannot post an event: %s", key, error)

    async def _write_if_needed(
        self,
        record: RunRecord,
        memory: RunMemory,
        before: RunStatus,
        after: RunStatus,
        now_s: float,
    ) -> None:
        if not status.needs_write(before, after, now_s):
            return
        after = after.but(updated_s=float(int(now_s)))
        body = await self._executor.write_status(record, after.to_dict())
        memory.status = after
        memory.status_version = int(body["metadata"]["resourceVersion"])
        memory.status_written_s = now_s
        for event in transition_events(record, before, after, now_s):
            await self.post_event(record.key, event)


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
