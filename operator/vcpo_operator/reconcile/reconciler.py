"""The reconciler: looks at one run and does what is missing.

    observe --> ask the learner --> judge, scale, plan (pure) --> execute --> write the status

Level-triggered: it never asks what happened, only what is. It may be killed at any call; the next
one finds what is there and goes on. What it keeps in memory is for speed and for the age of the
signals; losing it costs one more apply of each child and at most 30 s of the control loop's
counting (docs/design/011-state-of-the-operator.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from pydantic import ValidationError

from vcpo.spec import VCPORun
from vcpo.spec.errors import problems_of
from vcpo_operator.children.family import OperatorDefaults
from vcpo_operator.children.manifest import Kind
from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor, NameConflictError, is_refusal
from vcpo_operator.decisions import status
from vcpo_operator.decisions.actions import (
    Action,
    Apply,
    DeleteRun,
    IssueToken,
    SeedScaler,
    target_name,
)
from vcpo_operator.decisions.autoscale import AutoscaleDecision, decide_autoscale
from vcpo_operator.decisions.conditions import (
    ConditionInputs,
    ConditionState,
    condition_states,
    invalid_spec_conditions,
    retry_delayed_conditions,
)
from vcpo_operator.decisions.conflicts import is_ours, unreadable_token_conflict
from vcpo_operator.decisions.desired import desired_state
from vcpo_operator.decisions.draining import draining, has_workers
from vcpo_operator.decisions.events import recreated_event, transition_events
from vcpo_operator.decisions.lifecycle import (
    LifecyclePhase,
    is_past_time_to_live,
    judge,
    starts_new_attempt,
)
from vcpo_operator.decisions.plan import first_conflict, on_delete_actions, plan
from vcpo_operator.decisions.snapshot import (
    RESYNC_PERIOD_S,
    PlanResult,
    Snapshot,
    keeps_last_known_signals,
    report_of_this_run,
    signals_period_s,
)
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import OPERATOR_MANAGER, RunKey, credential_name
from vcpo_operator.observed.records import ObservedState, RunRecord
from vcpo_operator.observed.report import LearnerReport
from vcpo_operator.reconcile.event_causes import read_event_causes
from vcpo_operator.reconcile.exports import RunExports
from vcpo_operator.reconcile.memory import (
    RunMemory,
    is_recreated,
    is_refused,
    known_status,
    note,
    parent_of,
    refusal_of,
    refuse,
    remember,
    validated_run,
    with_unwatched,
)
from vcpo_operator.signals.client import LearnerCommandError, SignalSource

_LOGGER = logging.getLogger(__name__)
_UNWATCHED_PERIOD_S = 60.0
"""Time between two reads of the kinds that are not watched."""


class View(Protocol):
    """What is known of the cluster without asking it."""

    def run(self, key: RunKey) -> RunRecord | None:
        """A run; None when there is none."""

    def observed(self, key: RunKey) -> ObservedState:
        """What belongs to a run, PodMonitors and the token's Secret excepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """What a look at a run came to."""

    requeue_after_s: float | None
    """When to snapshot again if nothing happens; None when the run is gone or somebody else's."""
    error: str = ""
    """What went wrong; empty when nothing did. The run is then looked at again after a back-off."""
    retry_after_s: float | None = None
    """How long the API server wants to be left alone; None when it does not say."""


class Reconciler:
    """Reconciles runs, one look at one run at a time."""

    def __init__(
        self,
        *,
        view: View,
        executor: Executor,
        lines: SignalSource,
        defaults: OperatorDefaults,
        exports: RunExports,
        clock: Callable[[], float],
    ) -> None:
        self._view = view
        self._executor = executor
        self._lines = lines
        self._defaults = defaults
        self._exports = exports
        self._clock = clock
        self._memories: dict[RunKey, RunMemory] = {}

    async def reconcile(self, key: RunKey) -> ReconcileResult:
        """Look at a run and do what is missing."""
        record = self._view.run(key)
        if record is None or record.deleting:
            if record is not None and key in self._memories:
                await self._end_deleted_run(key)
            await self._forget(key)
            return ReconcileResult(requeue_after_s=None)
        if record.spec.get("managedBy", OPERATOR_MANAGER) != OPERATOR_MANAGER:
            return ReconcileResult(requeue_after_s=None)
        memory = self._memory(record)
        try:
            return await self._reconcile_record(record, memory)
        except (ApiError, LearnerCommandError) as error:
            _LOGGER.warning("%s: %s", key, error)
            wait_s = error.retry_after_s if isinstance(error, ApiError) else None
            return ReconcileResult(
                requeue_after_s=RESYNC_PERIOD_S, error=str(error), retry_after_s=wait_s
            )

    def observed_write_lag_s(self) -> float:
        """How long the oldest own write has not come back through the watch; 0 when all have.

        A watch that went deaf says nothing, which is also what a quiet cluster says; but what was
        written must come back.
        """
        now_s, lag_s = self._clock(), 0.0
        for key, memory in self._memories.items():
            record = self._view.run(key)
            if record is not None and record.resource_version < memory.status_version:
                lag_s = max(lag_s, now_s - memory.written_s)
        return lag_s

    async def _reconcile_record(self, record: RunRecord, memory: RunMemory) -> ReconcileResult:
        before = known_status(record, memory)
        try:
            run = validated_run(record, memory)
        except ValidationError as error:
            message = "; ".join(str(problem) for problem in problems_of(error))
            await self._write_conditions(
                record, memory, invalid_spec_conditions(message), record.generation
            )
            return ReconcileResult(requeue_after_s=RESYNC_PERIOD_S)
        now_s = self._clock()
        observed = await self._observe(record, run, memory, now_s)
        report = await self._report(record, run, before, observed)
        report = report_of_this_run(report, before, observed, now_s)
        # A learner that is told to end and does so has not failed.
        current = before if run.spec.suspend else before.with_restarts(observed)
        is_new_attempt = starts_new_attempt(run.spec, before, record.generation)
        if is_new_attempt:
            current, report = status.as_new_attempt(current), None
        current = status.with_clocks(current, run.spec, observed, report, now_s)
        current = status.with_report(current, report)
        verdict = judge(run.spec, current, report, now_s)
        had_ended = current.completion_s is not None
        current = status.with_end(current, verdict, now_s)
        since_s = before.drain_s
        drain = draining(run.spec, verdict, observed, report, since_s=since_s, now_s=now_s)
        snapshot = Snapshot(
            record=record,
            run=run,
            before=before,
            current=replace(current, drain_s=None if drain is None else drain.since_s),
            observed=observed,
            report=report,
            verdict=verdict,
            draining=drain,
            is_new_attempt=is_new_attempt,
            now_s=now_s,
        )
        if verdict.has_ended and not had_ended:
            return await self._record_end(snapshot, memory)
        if is_past_time_to_live(run.spec, current, now_s):
            await self._executor.execute(record.key, DeleteRun(uid=record.uid))
            return ReconcileResult(requeue_after_s=None)
        return await self._advance(snapshot, memory)

    async def _advance(self, snapshot: Snapshot, memory: RunMemory) -> ReconcileResult:
        autoscale = self._decide_autoscale(snapshot, memory)
        done = await self._carry_out(snapshot, memory, autoscale)
        if done.needs_replan:
            snapshot = replace(snapshot, observed=with_unwatched(snapshot.observed, memory))
            done = await self._carry_out(snapshot, memory, autoscale)
        if snapshot.is_new_attempt and done.error:
            # Pods of the attempt before may be left: the status goes on telling that it failed.
            generation = snapshot.before.observed_generation
            await self._write_conditions(
                snapshot.record, memory, retry_delayed_conditions(done.error), generation
            )
            return ReconcileResult(
                requeue_after_s=RESYNC_PERIOD_S, error=done.error, retry_after_s=done.retry_after_s
            )
        if autoscale is not None:
            memory.control = autoscale.state
        await self._report_status(snapshot, memory, autoscale, done)
        requeue_after_s = snapshot.requeue_after_s(self._clock())
        return ReconcileResult(
            requeue_after_s=requeue_after_s, error=done.error, retry_after_s=done.retry_after_s
        )

    def _decide_autoscale(self, snapshot: Snapshot, memory: RunMemory) -> AutoscaleDecision | None:
        if snapshot.verdict.phase is not LifecyclePhase.RUN:
            return None
        return decide_autoscale(
            snapshot.run.spec,
            known=memory.control,
            stored=snapshot.before.control,
            observed=snapshot.observed,
            report=snapshot.report,
            now_s=snapshot.now_s,
        )

    async def _carry_out(
        self, snapshot: Snapshot, memory: RunMemory, autoscale: AutoscaleDecision | None
    ) -> PlanResult:
        """Plan and carry out."""
        try:
            desired = desired_state(
                parent_of(snapshot.record, snapshot.run, memory),
                self._defaults,
                snapshot.verdict,
                decision=autoscale.decision if autoscale else None,
                asked={name: each.replicas for name, each in snapshot.observed.scalers.items()},
                draining=snapshot.draining,
                restarts_learner=snapshot.is_new_attempt,
            )
        except ValueError as error:
            return PlanResult(refusal=str(error))
        actions = plan(desired, snapshot.observed, applied=memory.applied, report=snapshot.report)
        if memory.token_conflict is not None:  # there may be one, which only cannot be seen
            actions = tuple(each for each in actions if not isinstance(each, IssueToken))
        try:
            await self._act(snapshot, memory, actions)
        except ApiError as error:
            return PlanResult(error=str(error), retry_after_s=error.retry_after_s)
        except LearnerCommandError as error:
            return PlanResult(error=str(error))
        except NameConflictError as error:
            return PlanResult(conflict=error.conflict)
        return PlanResult(
            refusal=refusal_of(memory, desired),
            conflict=first_conflict(desired, snapshot.observed) or memory.token_conflict,
            needs_replan=any(isinstance(action, IssueToken) for action in actions),
        )

    async def _act(self, snapshot: Snapshot, memory: RunMemory, actions: Iterable[Action]) -> None:
        """Act, and leave alone for now what the API server calls invalid.

        What is there is looked after all the same; nothing new is made beside what was refused, or
        workers would wait on their GPUs for a learner that cannot be.
        """
        key, refused = snapshot.record.key, set[str]()
        for action in actions:
            is_new = isinstance(action, SeedScaler) or (
                isinstance(action, Apply) and not action.force
            )
            if target_name(action) in refused or (refused and is_new):
                continue
            if isinstance(action, Apply) and is_refused(memory, action, snapshot.now_s):
                refused.add(target_name(action))
                continue
            _LOGGER.debug("%s: %s", key, action)
            try:
                applied = await self._executor.execute(key, action)
            except ApiError as error:
                if not (isinstance(action, Apply) and is_refusal(action, error)):
                    raise
                _LOGGER.warning("%s: %s", key, error)
                refuse(memory, action, str(error), snapshot.now_s)
                refused.add(target_name(action))
                continue
            if applied is not None:
                memory.applied[applied.uid] = applied.version
                if is_recreated(memory, applied):
                    self._exports.recreated(applied.kind)
                    await self._post_event(
                        key, recreated_event(snapshot.record, applied, snapshot.now_s)
                    )
            note(memory, action, applied)

    async def _record_end(self, snapshot: Snapshot, memory: RunMemory) -> ReconcileResult:
        """Write down that the run has ended before anything is cleaned up."""
        await self._report_status(snapshot, memory, None, PlanResult())
        return ReconcileResult(requeue_after_s=0.0)

    async def _write_conditions(
        self,
        record: RunRecord,
        memory: RunMemory,
        states: tuple[ConditionState, ...],
        generation: int,
    ) -> None:
        """Say what holds the run up; nothing else in its status changes."""
        before, now_s = known_status(record, memory), self._clock()
        after = status.with_conditions(before, states, generation=generation, now_s=now_s)
        await self._write(record, memory, before, after, now_s)

    async def _observe(
        self, record: RunRecord, run: VCPORun, memory: RunMemory, now_s: float
    ) -> ObservedState:
        """What is there, with the kinds that are read now and then instead of watched."""
        key = record.key
        watched = self._view.observed(key)
        read_s = memory.read_s
        if read_s is None or now_s - read_s >= _UNWATCHED_PERIOD_S or watched.lacks_reference:
            monitor = await self._executor.read(key, Kind.POD_MONITOR, key.name)
            remember(memory, Kind.POD_MONITOR, key.name, monitor)
            await self._read_token(record, run, memory)
            memory.read_s = now_s
        observed = with_unwatched(watched, memory)
        ours = (each for each in observed.children if is_ours(each, record.uid))
        memory.made.update({(each.kind, each.name): each.uid for each in ours})
        return await read_event_causes(observed, key, memory, self._executor, now_s)

    async def _read_token(self, record: RunRecord, run: VCPORun, memory: RunMemory) -> None:
        """Read the Secret with the token; where that is forbidden, go on with what is known."""
        named, own = run.spec.pods.token_secret_name, credential_name(record.key.name)
        owner_uid = None if named else record.uid
        try:
            secret = await self._executor.read_token(record.key, named or own, owner_uid=owner_uid)
        except ApiError as error:
            if not error.is_forbidden:
                raise
            memory.token_conflict = unreadable_token_conflict(str(error))
            return
        memory.token_conflict = None
        if named is None:
            remember(memory, Kind.SECRET, own, secret)

    async def _report(
        self, record: RunRecord, run: VCPORun, before: RunStatus, observed: ObservedState
    ) -> LearnerReport | None:
        if observed.learner is None or observed.learner.replicas == 0:
            await self._lines.disconnect(record.key)
            return None
        return await self._lines.ask(record.key, period_s=signals_period_s(run, before))

    async def _report_status(
        self,
        snapshot: Snapshot,
        memory: RunMemory,
        autoscale: AutoscaleDecision | None,
        done: PlanResult,
    ) -> None:
        decision = autoscale.decision if autoscale else None
        inputs = ConditionInputs(
            spec=snapshot.run.spec,
            verdict=snapshot.verdict,
            observed=snapshot.observed,
            decision=decision,
            has_stepped=snapshot.current.first_step_s is not None,
            report=snapshot.report,
            now_s=snapshot.now_s,
            conflict=done.stopped_by(),
            refusal=done.refusal,
            keeps_last_known_signals=keeps_last_known_signals(snapshot, memory.first_seen_s),
            before=snapshot.before,
        )
        desired = decision.replicas if decision else {}
        after = status.with_groups(
            snapshot.current,
            snapshot.run.spec,
            snapshot.observed,
            snapshot.verdict,
            desired,
            snapshot.now_s,
        )
        after = status.with_decision(after, decision, autoscale.state if autoscale else None)
        after = status.with_conditions(
            after,
            condition_states(inputs),
            generation=snapshot.record.generation,
            now_s=snapshot.now_s,
        )
        self._exports.show(snapshot.record.key, snapshot.run, after, decision)
        await self._write(snapshot.record, memory, snapshot.before, after, snapshot.now_s)

    async def _write(
        self,
        record: RunRecord,
        memory: RunMemory,
        before: RunStatus,
        after: RunStatus,
        now_s: float,
    ) -> None:
        if not status.needs_write(before, after, now_s):
            return
        after = status.with_update_time(after, now_s)
        body = await self._executor.write_status(record, after.to_dict())
        memory.status = after
        memory.status_version = int(body["metadata"]["resourceVersion"])
        memory.written_s = now_s
        for event in transition_events(record, before, after, now_s):
            await self._post_event(record.key, event)

    async def _post_event(self, key: RunKey, event: dict[str, object]) -> None:
        try:
            await self._executor.post_event(key, event)
        except ApiError as error:
            # The status says the same; an event is a courtesy.
            _LOGGER.info("%s: no event: %s", key, error)

    def _memory(self, record: RunRecord) -> RunMemory:
        memory = self._memories.get(record.key)
        if memory is None or memory.uid != record.uid:
            memory = RunMemory(uid=record.uid, first_seen_s=self._clock())
            self._memories[record.key] = memory
        return memory

    async def _end_deleted_run(self, key: RunKey) -> None:
        """Once, when a run is seen to be deleted: nothing can wait for its learner any more."""
        if not has_workers(self._view.observed(key)):
            return
        report = await self._lines.ask(key, period_s=0.0)
        for action in on_delete_actions(report):
            await self._executor.execute(key, action)

    async def _forget(self, key: RunKey) -> None:
        self._memories.pop(key, None)
        self._exports.forget(key)
        self._executor.forget(key)
        await self._lines.disconnect(key)
