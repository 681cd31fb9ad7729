"""The reconciler: observes one run, decides what it lacks, and does it.

    observe --> learner's signals --> judge, scale, plan (pure) --> execute --> write the status

It is level-triggered: it reads states, not changes. It may be killed at any call; the
next reconcile does the rest. It keeps a memory to save calls and to know the age of signals. Losing
it costs one more apply of each child and at most 30 s of the control loop's counting
(docs/inside/operator-and-workers.md).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from vcpo.api.errors import problems_of
from vcpo.metrics.hosted_runs import HostedRuns
from vcpo_operator.children.manifest import Kind
from vcpo_operator.children.network import OperatorDefaults
from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.decisions.autoscale import decide_autoscale
from vcpo_operator.decisions.conditions import invalid_spec_conditions, retry_delayed_conditions
from vcpo_operator.decisions.lifecycle import LifecyclePhase, has_workers, is_past_time_to_live
from vcpo_operator.decisions.plan import Delete, on_delete_actions
from vcpo_operator.decisions.snapshot import RESYNC_PERIOD_S, PlanResult, Snapshot, judge_run
from vcpo_operator.names import RunKey
from vcpo_operator.observed.records import RunRecord
from vcpo_operator.reconcile.memory import RunMemory
from vcpo_operator.reconcile.observer import Observer, View
from vcpo_operator.reconcile.plan_runner import PlanRunner
from vcpo_operator.reconcile.status_writer import StatusWriter
from vcpo_operator.signals.client import LearnerCommandError, SignalSource

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """How a reconcile ended."""

    requeue_after_s: float | None
    """Seconds to the next reconcile if nothing happens before; None: none is needed."""
    error: str = ""
    """The error that stopped it; empty when none did. The next reconcile then waits a back-off."""
    retry_after_s: float | None = None
    """How long the API server asked to be left alone; None when it did not."""


class Reconciler:
    """Reconciles runs; each run at most once at a time. One owner: the reconcile loop."""

    def __init__(
        self,
        *,
        view: View,
        executor: Executor,
        signals: SignalSource,
        defaults: OperatorDefaults,
        exports: HostedRuns,
        clock: Callable[[], float],
    ) -> None:
        self._view = view
        self._executor = executor
        self._signals = signals
        self._exports = exports
        self._clock = clock
        self._observer = Observer(view, executor, signals)
        self._writer = StatusWriter(executor, exports)
        self._runner = PlanRunner(executor, self._writer, defaults)
        self._memories: dict[RunKey, RunMemory] = {}

    async def reconcile(self, key: RunKey) -> ReconcileResult:
        """Observe a run and do what it lacks."""
        record = self._view.run(key)
        if record is None or record.deleting:
            await self._forget_run(record, key)
            return ReconcileResult(requeue_after_s=None)
        memory = self._memories.get(key)
        if memory is None or memory.uid != record.uid:
            memory = RunMemory(uid=record.uid, first_seen_s=self._clock())
            self._memories[key] = memory
        try:
            return await self._reconcile_record(record, memory)
        except (ApiError, LearnerCommandError) as error:
            _LOGGER.warning("%s: %s", key, error)
            wait_s = error.retry_after_s if isinstance(error, ApiError) else None
            return ReconcileResult(
                requeue_after_s=RESYNC_PERIOD_S, error=str(error), retry_after_s=wait_s
            )

    def observed_write_lag_s(self) -> float:
        """Return how long the watch has not shown the oldest own write; 0 when it shows all.

        A watch that lost its connection is silent, and so is a quiet cluster. Only own writes,
        which must come back, tell them apart.
        """
        now_s, lag_s = self._clock(), 0.0
        for key, memory in self._memories.items():
            record = self._view.run(key)
            if record is not None and record.resource_version < memory.status_version:
                lag_s = max(lag_s, now_s - memory.status_written_s)
        return lag_s

    async def _reconcile_record(self, record: RunRecord, memory: RunMemory) -> ReconcileResult:
        before, now_s = memory.last_known_status(record), self._clock()
        try:
            run = memory.validated_run(record)
        except ValidationError as error:
            message = "; ".join(map(str, problems_of(error)))
            states, generation = invalid_spec_conditions(message), record.generation
            await self._writer.write_conditions(
                record, memory, states, generation=generation, now_s=now_s
            )
            return ReconcileResult(requeue_after_s=RESYNC_PERIOD_S)
        observed = await self._observer.observe(record, run, memory, before, now_s=now_s)
        signals = await self._observer.signals(record, run, before, observed)
        snapshot = judge_run(
            record,
            run,
            before=before,
            observed=observed,
            signals=signals,
            now_s=now_s,
            kept=memory.kept_revision(observed),
            silence=self._signals.silence(record.key),
        )
        if snapshot.ends_now:
            # The status must say that the run has ended before anything is cleaned up.
            await self._writer.write(snapshot, memory, None, PlanResult())
            return ReconcileResult(requeue_after_s=0.0)
        if is_past_time_to_live(run.spec, snapshot.current, now_s):
            deletion = Delete(kind=Kind.RUN, name=record.key.name, uid=record.uid)
            await self._executor.execute(record.key, deletion)
            return ReconcileResult(requeue_after_s=None)
        return await self._execute_and_write(snapshot, memory)

    async def _execute_and_write(self, snapshot: Snapshot, memory: RunMemory) -> ReconcileResult:
        autoscale = None
        if snapshot.verdict.phase is LifecyclePhase.RUN:
            autoscale = decide_autoscale(
                snapshot.run.spec,
                known=memory.control,
                stored=snapshot.before.control,
                observed=snapshot.observed,
                signals=snapshot.signals,
                now_s=snapshot.now_s,
            )
        result = await self._runner.run(snapshot, memory, autoscale)
        requeue_after_s = RESYNC_PERIOD_S
        if snapshot.is_new_attempt and result.error:
            # Pods of the last attempt may remain, so the status keeps saying that it failed.
            await self._writer.write_conditions(
                snapshot.record,
                memory,
                retry_delayed_conditions(result.error),
                generation=snapshot.before.observed_generation,
                now_s=self._clock(),
            )
        else:
            if autoscale is not None:
                memory.control = autoscale.state
            await self._writer.write(snapshot, memory, autoscale, result)
            requeue_after_s = snapshot.requeue_after_s(self._clock())
        return ReconcileResult(
            requeue_after_s=requeue_after_s, error=result.error, retry_after_s=result.retry_after_s
        )

    async def _forget_run(self, record: RunRecord | None, key: RunKey) -> None:
        """Forget a deleted run, after one drain command to its learner."""
        is_first = record is not None and key in self._memories
        if is_first and has_workers(self._view.observed_state(key)):
            signals = await self._signals.fetch_signals(key, period_s=0.0)
            for action in on_delete_actions(signals):
                await self._executor.execute(key, action)
        self._memories.pop(key, None)
        self._exports.forget(key)
        await self._executor.set_access(key, None)
        await self._signals.disconnect(key)
