"""The training loop: wait for a batch, update, publish, record; evaluate and save now and then.

It runs on the learner's event loop and owns the order of things; whatever takes long (tensors,
files) runs in one worker thread, so that leases and fetches are answered meanwhile. The model
belongs to that thread between two awaits of `_in_thread`.

Policy version n is the parameters after n steps. A step whose update was refused (numbers that are
not finite) publishes a version equal to the one before: versions count steps, not successes, so
that admission and lag need only one clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vcpo.algo import FreshTokens, MismatchError, audit_mismatch
from vcpo.records.journal import EvaluationRecord, read_metrics
from vcpo.records.step_record import StepRecord, update_fields
from vcpo.spec import algorithm_warnings, batch_warnings
from vcpo.wire.phase import RunPhase
from vcpo_learner.ledger.failure_watch import TooManyFailuresError
from vcpo_learner.ledger.groups import Group
from vcpo_learner.model.checkpoint import CheckpointError
from vcpo_learner.model.disk import DiskFullError
from vcpo_learner.model.loading import (
    policy_payload,
    published_precision,
    restore_policy,
)
from vcpo_learner.telemetry.step_log import StepNews
from vcpo_learner.training.parts import TrainingParts
from vcpo_learner.training.quarantine import Quarantine
from vcpo_learner.training.saving import Saving
from vcpo_learner.training.step_guard import BrokenBatchError, StepGuard
from vcpo_learner.training.token_lags import LagStatistics, lag_statistics
from vcpo_learner.update.result import UpdateResult

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Training:
    """One learner's work from its first to its last step."""

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self._spec = parts.run.spec
        self._precision = published_precision(parts.run.spec)
        self._dispatcher = parts.dispatcher
        self._quarantine = Quarantine(parts.run_dir / "quarantine")
        self._guard = StepGuard(parts.update, self._quarantine)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors")
        self._saving = Saving(parts, self._thread)
        self._evaluation: asyncio.Task[None] | None = None
        """The round that runs beside training, until its outcome was looked at."""
        self._news = StepNews(parts.run.spec.steps)
        self._unaudited: FreshTokens | None = FreshTokens()
        """Fresh tokens of the steps so far; None when they were enough and have been judged."""

    def require_unused(self) -> None:
        """Refuse to begin where another run has left checkpoints, which this one would mix up.

        Raises:
            CheckpointError: naming the directory and the cure.
        """
        if steps := self._saving.checkpoints.steps():
            raise CheckpointError(
                f"--run-dir: {self._parts.run_dir} holds a checkpoint of step {steps[-1]}; add"
                " --resume, or give another directory"
            )

    def resume(self) -> int:
        """Go on from the newest checkpoint that is whole; returns its step, 0 when there is none.

        Raises:
            CheckpointError: when there are checkpoints and none can be used.
        """
        checkpoint, damaged = self._saving.checkpoints.load_newest()
        if checkpoint is None:
            return 0
        for one in damaged:
            self.event("CheckpointDamaged", f"{one}; going on from step {checkpoint.step}")
        self._saving.checkpoints.set_aside(damaged)
        restore_policy(self._parts.model, checkpoint.parameters)
        self._parts.update.load_state_dict(checkpoint.update_state)
        self._dispatcher.ledger.restore(checkpoint.ledger)
        self._leave_out(self._quarantine.excluded_lease_ids(), {}, checkpoint.step)
        self._dispatcher.resume_at(checkpoint.step)
        self._check_resumed()
        recorded_steps = read_metrics(self._parts.run_dir).steps
        # What was recorded after the checkpoint is taken again.
        self._parts.signals.resumed([one for one in recorded_steps if one.step <= checkpoint.step])
        self._parts.gauges.resumed()
        self._saving.saved_step = checkpoint.step
        self.event("Resumed", f"from the checkpoint of step {checkpoint.step}")
        return checkpoint.step

    async def run(self, drain_s: float) -> RunPhase:
        """Train until the last step or until the dispatcher leaves the phase `running`.

        When it drains, work in flight has `drain_s` seconds to come in before the checkpoint.

        A run that was complete before stays so at once, without workers.

        Raises:
            MismatchError: when sampler and learner turn out not to compute the same policy.
            TooManyFailuresError: when nothing is answered any more; the steps taken are saved.
        """
        if self._saving.is_complete:
            self._end("complete before this start")
            return self._dispatcher.phase
        for warning in algorithm_warnings(self._spec.algorithm):
            self.event("Warning", f"algorithm: {warning}")
        for warning in batch_warnings(self._spec.batch, self._spec.algorithm):
            self.event("Warning", f"batch: {warning}")
        await self._publish()
        try:
            await self._take_steps()
        except TooManyFailuresError as error:
            self.report_failures()
            self.event("Failed", str(error))
            if self._dispatcher.policy_version > 0:
                with contextlib.suppress(DiskFullError):
                    await self._saving.save()
            raise
        await self._finish(drain_s)
        return self._dispatcher.phase

    def report_failures(self) -> None:
        """Write an event for each failed generation that is a new one, or one of very many."""
        for line in self._dispatcher.failures.take_event_lines():
            self.event("GenerationFailed", line)

    def event(self, kind: str, message: str) -> None:
        """Write an event of the learner."""
        self._parts.event(kind, message)

    async def _take_steps(self) -> None:
        """Take steps until the last one, or until there will be no further batch."""
        if self._dispatcher.policy_version == 0:
            await self._evaluate(exclusive=True)
        while self._dispatcher.policy_version < self._spec.steps:
            if not await self._step():
                return

    async def _step(self) -> bool:
        """Take one optimizer step; False when there will be no further batch."""
        waiting_since_s = self._parts.clock()
        self._parts.signals.waiting()
        groups = await self._dispatcher.next_batch()
        if groups is None:
            return False
        started_s = self._parts.clock()
        self._parts.signals.working()
        version = self._dispatcher.policy_version
        lag_limit_steps = self._dispatcher.admission_lag_steps
        try:
            pending = await self._in_thread(
                lambda: self._guard.begin(groups, policy_version=version)
            )
            # What workers answered meanwhile is of the version that the parameters still are.
            wanted = pending.wanted_fresh_tokens
            newest = self._dispatcher.ledger.newest_trajectories(version, num_tokens=wanted)
            result = await self._in_thread(lambda: self._guard.finish(groups, pending, newest))
        except BrokenBatchError as error:
            self._dispatcher.ledger.return_batch(groups)
            self._leave_out(error.reasons, error.reasons, version)
            self._dispatcher.notify()
            return True
        self._audit(result)
        self._dispatcher.advance_version()
        await self._publish()
        finished_s = self._parts.clock()
        record = self._record(
            result,
            lag=lag_statistics(groups, version),
            lag_limit_steps=lag_limit_steps,
            idle_s=started_s - waiting_since_s,
            step_s=finished_s - started_s,
        )
        self._report(record, groups)
        for kind, message in self._news.events(record, result.skip_detail):
            self.event(kind, message)
        if (line := self._news.log_line(record)) is not None:
            _LOGGER.info("%s", line)
        await self._between_steps(record.step)
        return True

    def _leave_out(self, lease_ids: Collection[str], reasons: Mapping[str, str], step: int) -> None:
        """Drop groups that no step can be taken on, from the replay too; keep each on disk once."""
        kept = self._quarantine.kept_lease_ids()
        left_out = self._parts.update.forget(lease_ids)
        prompts: dict[str, int] = {}
        for group in self._dispatcher.ledger.quarantine(lease_ids):
            left_out[group.lease_id] = group.trajectories
            prompts[group.lease_id] = group.prompt_index
        for lease_id, trajectories in left_out.items():
            if lease_id in kept:
                continue
            deaths = f"the learner died {self._quarantine.deaths(lease_id)} times in a step with it"
            reason = reasons.get(lease_id, deaths)
            prompt = prompts.get(lease_id)
            try:
                path = self._quarantine.keep(
                    lease_id, trajectories, prompt_index=prompt, reason=reason, step=step
                )
                where = str(path)
            except OSError as error:
                where = f"nowhere ({error.strerror})"
            what = "kept for replay" if prompt is None else f"prompt {prompt}"
            self.event(
                "GroupQuarantined",
                f"{lease_id} ({what}) is not trained on: {reason}; kept in {where}",
            )

    def _audit(self, result: UpdateResult) -> None:
        """Once after every start, when the steps since have enough fresh tokens between them.

        The step that brings enough is judged before it is published.
        """
        if self._unaudited is None:
            return
        self._unaudited += result.fresh
        try:
            gap = audit_mismatch(self._unaudited, self._spec.mismatch_limit_nats)
        except MismatchError as error:
            self.event("SelfCheckFailed", str(error))
            raise
        if gap is not None:
            self._unaudited = None
            self.event("SelfCheck", f"sampler and learner differ by {gap:.2g} nats per token")

    async def _between_steps(self, step: int) -> None:
        last = step >= self._spec.steps
        if self._evaluation is not None and self._evaluation.done():
            await self._join_evaluation()
        if step % self._spec.evaluation.every_steps == 0 and not last and self._evaluation is None:
            self._evaluation = asyncio.create_task(self._evaluate(exclusive=False))
        if not last:
            await self._saving.save_if_due()

    async def _finish(self, drain_s: float) -> None:
        await self._join_evaluation()
        if self._dispatcher.phase is RunPhase.RUNNING:
            await self._evaluate(exclusive=True)
        else:
            await self._dispatcher.wait_until_idle(drain_s)
        await self._saving.finish(drain_s)
        self._end("the model is saved")

    def _end(self, how: str) -> None:
        """Tell everybody that the run is complete, unless it was asked to stop before."""
        if self._dispatcher.complete():
            self.event("Complete", f"{self._dispatcher.policy_version} steps; {how}")
        self._thread.shutdown()

    async def _join_evaluation(self) -> None:
        """Wait for the round beside training; what went wrong in it goes wrong here."""
        if self._evaluation is not None:
            await self._evaluation
            self._evaluation = None

    def _check_resumed(self) -> None:
        """Check what admission rests on: B trajectories consumed for each version.

        A step consumes one batch and makes one version, and a checkpoint is written between steps,
        so admission needs no other base after a restart.
        """
        version = self._dispatcher.policy_version
        expected = version * self._spec.batch.trajectories
        consumed = self._dispatcher.ledger.counts().consumed
        if consumed != expected:
            raise CheckpointError(
                f"checkpoint of step {version}: {consumed} trajectories consumed, must be"
                f" {expected}; remove it to resume from the one before"
            )

    async def _publish(self) -> None:
        version = self._dispatcher.policy_version
        policies, model = self._parts.policies, self._parts.model
        prepared = await self._in_thread(
            lambda: policies.prepare(version, policy_payload(model, self._precision))
        )
        policies.publish(prepared)
        if self._parts.archive_writer is not None:
            self._parts.archive_writer.offer(prepared)
        self._dispatcher.notify()

    async def _evaluate(self, *, exclusive: bool) -> None:
        step = self._dispatcher.policy_version
        result = await self._dispatcher.evaluate(step, exclusive=exclusive)
        if result is None:
            self.event("EvaluationWithoutResult", f"no held-out prompt was answered at step {step}")
            return
        record = EvaluationRecord(
            step=result.step,
            time_unix_s=time.time(),
            accuracy=result.accuracy,
            num_trajectories=result.num_trajectories,
            policy_version_min=result.policy_version_min,
            policy_version_max=result.policy_version_max,
        )
        self._parts.journal.evaluation(record)
        self._parts.signals.evaluation(record)
        self._parts.gauges.evaluation(record)
        _LOGGER.info(
            "evaluation of step %d: accuracy %.3f over %d responses",
            record.step,
            record.accuracy,
            record.num_trajectories,
        )

    def _record(
        self,
        result: UpdateResult,
        *,
        lag: LagStatistics,
        lag_limit_steps: int,
        idle_s: float,
        step_s: float,
    ) -> StepRecord:
        dispatcher = self._dispatcher
        counts = dispatcher.ledger.counts()
        counts.check()
        return StepRecord(
            step=dispatcher.policy_version,
            time_unix_s=time.time(),
            lag_mean=lag.mean,
            lag_p50=lag.p50,
            lag_max=lag.maximum,
            step_s=step_s,
            idle_s=idle_s,
            tokens_per_s=self._parts.signals.tokens_per_s(),
            admission_lag_steps=lag_limit_steps,
            workers=len(dispatcher.workers()),
            weight_updates_in_flight=dispatcher.weight_updates_in_flight(),
            leased=counts.leased,
            in_flight=counts.in_flight,
            buffered=counts.buffered,
            consumed=counts.consumed,
            dropped=dict(counts.dropped),
            **update_fields(result),
        )

    def _report(self, record: StepRecord, groups: Sequence[Group]) -> None:
        self._parts.journal.step(record)
        self._parts.signals.step(record)
        self._parts.gauges.step(record, groups)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
