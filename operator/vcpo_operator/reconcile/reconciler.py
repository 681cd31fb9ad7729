"""The reconciler: looks at one run and does what is missing.

    observe --> ask the learner --> judge, steer, plan (pure) --> carry out --> write the status

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
from vcpo_operator.cluster_api.executor import Executor, ObstacleError, is_refusal
from vcpo_operator.decisions import status
from vcpo_operator.decisions.actions import (
    Action,
    Apply,
    DeleteRun,
    IssueToken,
    SeedScaler,
    target_name,
)
from vcpo_operator.decisions.autoscale import Steering, steer
from vcpo_operator.decisions.conditions import Finding, Situation, delay, findings, refusal
from vcpo_operator.decisions.desired import wish_for
from vcpo_operator.decisions.draining import draining, has_workers
from vcpo_operator.decisions.events import recreation, transitions
from vcpo_operator.decisions.lifecycle import Course, has_outlived_itself, is_tried_again, judge
from vcpo_operator.decisions.obstacles import is_ours, unreadable_token
from vcpo_operator.decisions.plan import blocked_by, farewell, plan
from vcpo_operator.decisions.snapshot import (
    REST_S,
    CarriedOut,
    Look,
    ask_period_s,
    believed,
    keeps_signals,
)
from vcpo_operator.decisions.status_model import RunStatus
from vcpo_operator.names import OPERATOR_MANAGER, RunKey, credential_name
from vcpo_operator.observed.records import Observed, RunRecord
from vcpo_operator.observed.report import LearnerReport
from vcpo_operator.reconcile.explanations import explain
from vcpo_operator.reconcile.exports import RunExports
from vcpo_operator.reconcile.memory import (
    RunMemory,
    accepted,
    is_recreated,
    is_refused,
    known_status,
    note,
    parent_of,
    refusal_of,
    refuse,
    remember,
    with_unwatched,
)
from vcpo_operator.signals.client import SignalsError, SignalSource

_LOGGER = logging.getLogger(__name__)
_UNWATCHED_PERIOD_S = 60.0
"""Time between two reads of the kinds that are not watched."""


class View(Protocol):
    """What is known of the cluster without asking it."""

    def run(self, key: RunKey) -> RunRecord | None:
        """A run; None when there is none."""

    def observed(self, key: RunKey) -> Observed:
        """What belongs to a run, PodMonitors and the token's Secret excepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a look at a run came to."""

    wake_in_s: float | None
    """When to look again if nothing happens; None when the run is gone or somebody else's."""
    trouble: str = ""
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

    async def reconcile(self, key: RunKey) -> Outcome:
        """Look at a run and do what is missing."""
        record = self._view.run(key)
        if record is None or record.deleting:
            if record is not None and key in self._memories:
                await self._take_leave(key)
            await self._forget(key)
            return Outcome(wake_in_s=None)
        if record.spec.get("managedBy", OPERATOR_MANAGER) != OPERATOR_MANAGER:
            return Outcome(wake_in_s=None)
        memory = self._memory(record)
        try:
            return await self._look(record, memory)
        except (ApiError, SignalsError) as error:
            _LOGGER.warning("%s: %s", key, error)
            wait_s = error.retry_after_s if isinstance(error, ApiError) else None
            return Outcome(wake_in_s=REST_S, trouble=str(error), retry_after_s=wait_s)

    def echo_lag_s(self) -> float:
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

    async def _look(self, record: RunRecord, memory: RunMemory) -> Outcome:
        before = known_status(record, memory)
        try:
            run = accepted(record, memory)
        except ValidationError as error:
            message = "; ".join(str(problem) for problem in problems_of(error))
            await self._tell(record, memory, refusal(message), record.generation)
            return Outcome(wake_in_s=REST_S)
        now_s = self._clock()
        observed = await self._observed(record, run, memory, now_s)
        report = await self._report(record, run, before, observed)
        report = believed(report, before, observed, now_s)
        # A learner that is told to end and does so has not failed.
        current = before if run.spec.suspend else before.with_restarts(observed)
        is_new_attempt = is_tried_again(run.spec, before, record.generation)
        if is_new_attempt:
            current, report = status.tried_again(current), None
        current = status.begun(current, run.spec, observed, report, now_s)
        current = status.with_report(current, report)
        verdict = judge(run.spec, current, report, now_s)
        had_ended = current.completion_s is not None
        current = status.ended(current, verdict, now_s)
        since_s = before.drain_s
        drain = draining(run.spec, verdict, observed, report, since_s=since_s, now_s=now_s)
        look = Look(
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
        if verdict.ended and not had_ended:
            return await self._record_end(look, memory)
        if has_outlived_itself(run.spec, current, now_s):
            await self._executor.carry_out(record.key, DeleteRun(uid=record.uid))
            return Outcome(wake_in_s=None)
        return await self._advance(look, memory)

    async def _advance(self, look: Look, memory: RunMemory) -> Outcome:
        steering = self._steer(look, memory)
        done = await self._carry_out(look, memory, steering)
        if done.goes_on:
            look = replace(look, observed=with_unwatched(look.observed, memory))
            done = await self._carry_out(look, memory, steering)
        if look.is_new_attempt and done.trouble:
            # Pods of the attempt before may be left: the status goes on telling that it failed.
            generation = look.before.observed_generation
            await self._tell(look.record, memory, delay(done.trouble), generation)
            return Outcome(wake_in_s=REST_S, trouble=done.trouble, retry_after_s=done.retry_after_s)
        if steering is not None:
            memory.control = steering.state
        await self._report_status(look, memory, steering, done)
        wake_in_s = look.wake_in_s(self._clock())
        return Outcome(wake_in_s=wake_in_s, trouble=done.trouble, retry_after_s=done.retry_after_s)

    def _steer(self, look: Look, memory: RunMemory) -> Steering | None:
        if look.verdict.course is not Course.RUN:
            return None
        return steer(
            look.run.spec,
            known=memory.control,
            stored=look.before.control,
            observed=look.observed,
            report=look.report,
            now_s=look.now_s,
        )

    async def _carry_out(
        self, look: Look, memory: RunMemory, steering: Steering | None
    ) -> CarriedOut:
        """Plan and carry out."""
        try:
            wish = wish_for(
                parent_of(look.record, look.run, memory),
                self._defaults,
                look.verdict,
                decision=steering.decision if steering else None,
                asked={name: each.replicas for name, each in look.observed.scalers.items()},
                draining=look.draining,
                restarts_learner=look.is_new_attempt,
            )
        except ValueError as error:
            return CarriedOut(refusal=str(error))
        actions = plan(wish, look.observed, applied=memory.applied, report=look.report)
        if memory.token_obstacle is not None:  # there may be one, which only cannot be seen
            actions = tuple(each for each in actions if not isinstance(each, IssueToken))
        try:
            await self._act(look, memory, actions)
        except ApiError as error:
            return CarriedOut(trouble=str(error), retry_after_s=error.retry_after_s)
        except SignalsError as error:
            return CarriedOut(trouble=str(error))
        except ObstacleError as error:
            return CarriedOut(obstacle=error.obstacle)
        return CarriedOut(
            refusal=refusal_of(memory, wish),
            obstacle=blocked_by(wish, look.observed) or memory.token_obstacle,
            goes_on=any(isinstance(action, IssueToken) for action in actions),
        )

    async def _act(self, look: Look, memory: RunMemory, actions: Iterable[Action]) -> None:
        """Act, and leave alone for now what the API server calls invalid.

        What is there is looked after all the same; nothing new is made beside what was refused, or
        workers would wait on their GPUs for a learner that cannot be.
        """
        key, refused = look.record.key, set[str]()
        for action in actions:
            is_new = isinstance(action, SeedScaler) or (
                isinstance(action, Apply) and not action.force
            )
            if target_name(action) in refused or (refused and is_new):
                continue
            if isinstance(action, Apply) and is_refused(memory, action, look.now_s):
                refused.add(target_name(action))
                continue
            _LOGGER.debug("%s: %s", key, action)
            try:
                applied = await self._executor.carry_out(key, action)
            except ApiError as error:
                if not (isinstance(action, Apply) and is_refusal(action, error)):
                    raise
                _LOGGER.warning("%s: %s", key, error)
                refuse(memory, action, str(error), look.now_s)
                refused.add(target_name(action))
                continue
            if applied is not None:
                memory.applied[applied.uid] = applied.version
                if is_recreated(memory, applied):
                    self._exports.recreated(applied.kind)
                    await self._post(key, recreation(look.record, applied, look.now_s))
            note(memory, action, applied)

    async def _record_end(self, look: Look, memory: RunMemory) -> Outcome:
        """Write down that the run has ended before anything is cleaned up."""
        await self._report_status(look, memory, None, CarriedOut())
        return Outcome(wake_in_s=0.0)

    async def _tell(
        self, record: RunRecord, memory: RunMemory, found: tuple[Finding, ...], generation: int
    ) -> None:
        """Say what holds the run up; nothing else in its status changes."""
        before, now_s = known_status(record, memory), self._clock()
        after = status.with_findings(before, found, generation=generation, now_s=now_s)
        await self._write(record, memory, before, after, now_s)

    async def _observed(
        self, record: RunRecord, run: VCPORun, memory: RunMemory, now_s: float
    ) -> Observed:
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
        return await explain(observed, key, memory, self._executor, now_s)

    async def _read_token(self, record: RunRecord, run: VCPORun, memory: RunMemory) -> None:
        """Read the Secret with the token; where that is forbidden, go on with what is known."""
        named, own = run.spec.pods.token_secret_name, credential_name(record.key.name)
        owner_uid = None if named else record.uid
        try:
            secret = await self._executor.read_token(record.key, named or own, owner_uid=owner_uid)
        except ApiError as error:
            if not error.is_forbidden:
                raise
            memory.token_obstacle = unreadable_token(str(error))
            return
        memory.token_obstacle = None
        if named is None:
            remember(memory, Kind.SECRET, own, secret)

    async def _report(
        self, record: RunRecord, run: VCPORun, before: RunStatus, observed: Observed
    ) -> LearnerReport | None:
        if observed.learner is None or observed.learner.replicas == 0:
            await self._lines.hang_up(record.key)
            return None
        return await self._lines.ask(record.key, period_s=ask_period_s(run, before))

    async def _report_status(
        self, look: Look, memory: RunMemory, steering: Steering | None, done: CarriedOut
    ) -> None:
        decision = steering.decision if steering else None
        situation = Situation(
            spec=look.run.spec,
            verdict=look.verdict,
            observed=look.observed,
            decision=decision,
            has_stepped=look.current.first_step_s is not None,
            report=look.report,
            now_s=look.now_s,
            obstacle=done.stopped_by(),
            refusal=done.refusal,
            keeps_signals=keeps_signals(look, memory.first_look_s),
            before=look.before,
        )
        desired = decision.replicas if decision else {}
        after = status.with_groups(
            look.current, look.run.spec, look.observed, look.verdict, desired, look.now_s
        )
        after = status.with_decision(after, decision, steering.state if steering else None)
        after = status.with_findings(
            after, findings(situation), generation=look.record.generation, now_s=look.now_s
        )
        self._exports.show(look.record.key, look.run, after, decision)
        await self._write(look.record, memory, look.before, after, look.now_s)

    async def _write(
        self,
        record: RunRecord,
        memory: RunMemory,
        before: RunStatus,
        after: RunStatus,
        now_s: float,
    ) -> None:
        if not status.is_due(before, after, now_s):
            return
        after = status.stamped(after, now_s)
        body = await self._executor.write_status(record, after.to_dict())
        memory.status = after
        memory.status_version = int(body["metadata"]["resourceVersion"])
        memory.written_s = now_s
        for event in transitions(record, before, after, now_s):
            await self._post(record.key, event)

    async def _post(self, key: RunKey, event: dict[str, object]) -> None:
        try:
            await self._executor.post_event(key, event)
        except ApiError as error:
            # The status says the same; an event is a courtesy.
            _LOGGER.info("%s: no event: %s", key, error)

    def _memory(self, record: RunRecord) -> RunMemory:
        memory = self._memories.get(record.key)
        if memory is None or memory.uid != record.uid:
            memory = RunMemory(uid=record.uid, first_look_s=self._clock())
            self._memories[record.key] = memory
        return memory

    async def _take_leave(self, key: RunKey) -> None:
        """Once, when a run is seen to be deleted: nothing can wait for its learner any more."""
        if not has_workers(self._view.observed(key)):
            return
        report = await self._lines.ask(key, period_s=0.0)
        for action in farewell(report):
            await self._executor.carry_out(key, action)

    async def _forget(self, key: RunKey) -> None:
        self._memories.pop(key, None)
        self._exports.forget(key)
        self._executor.forget(key)
        await self._lines.hang_up(key)
