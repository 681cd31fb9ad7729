"""The training loop: wait for a batch, update, publish, record; sometimes evaluate and save.

The loop runs on the learner's event loop. Work that takes long (tensors, files) runs in one worker
thread, so the event loop serves leases and fetches meanwhile. While such work runs, the model
belongs to the thread.

A step whose update was skipped publishes a version with the same parameters as the version before.
Versions count steps and not updates, so admission and lag use one count.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import VCPORun, VCPORunSpec, algorithm_warnings, batch_warnings, rollout_warnings
from vcpo.control.limits import ChangeKind, lag_change_sentence, warning_reason
from vcpo.judgement import lasting_collapse
from vcpo.metrics.label_values import Stage
from vcpo.records.reasons import DropReason
from vcpo.records.step_record import StepRecord, update_fields
from vcpo.service.lifecycle import StartError, peak_memory_bytes
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.clock import Clock
from vcpo_learner.event_loop import TensorThread
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.ledger.workers import TooManyFailuresError
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.step_log import (
    RunRecords,
    StepLog,
    far_rewards,
    streak_fields,
    window_fields,
)
from vcpo_learner.training.batches import batch_fields, evaluation_samples, step_samples
from vcpo_learner.training.mismatch_watch import MismatchWatch
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.training.publication import Publication
from vcpo_learner.training.recovery import Recovery, Rollback
from vcpo_learner.training.saving import RunSaver
from vcpo_learner.troubles import Answer, Trouble, Troubles
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.result import PendingStep, UpdateResult
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore

_LOGGER = logging.getLogger(__name__)
_POLL_S = 1.0
"""Time between two looks at whether the run still waits for its log."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingLoop:
    """Takes the steps of one run. Owner: the learner's event loop."""

    run_object: VCPORun
    run_dir: Path
    policy: PolicyOnRanks
    published: PublishedState
    policies: PolicyStore
    weight_server: WeightServer | None
    """Sends the versions' files; None: all workers see them."""
    dispatcher: Dispatcher
    log: RedoLog
    signals: SignalWindow
    gauges: LearnerGauges
    records: RunRecords
    troubles: Troubles
    clock: Clock
    spec: VCPORunSpec = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    update: PolicyUpdate = field(init=False)
    thread: TensorThread = field(init=False)
    saver: RunSaver = field(init=False)
    rollback: Rollback = field(init=False)
    publication: Publication = field(init=False)
    recovery: Recovery = field(init=False)
    mismatch: MismatchWatch = field(init=False)
    step_log: StepLog = field(init=False)
    _evaluation: asyncio.Task[None] | None = field(default=None, init=False)
    """The evaluation beside training, until it was awaited."""

    def __post_init__(self) -> None:
        """Make the parts that only the loop uses."""
        run, policy = self.run_object, self.policy
        self.spec = spec = run.spec
        self.tokenizer, self.update = policy.tokenizer, policy.update
        self.thread = thread = TensorThread()
        self.step_log = StepLog(spec.steps, clock=self.clock)
        self.saver = RunSaver(
            run=run,
            run_dir=self.run_dir,
            export=ModelExport(run.metadata.name, spec.model, policy.model, policy.tokenizer),
            update=self.update,
            dispatcher=self.dispatcher,
            log=self.log,
            thread=thread,
            gauges=self.gauges,
            records=self.records,
            troubles=self.troubles,
        )
        self.rollback = Rollback(
            age_steps=spec.rollback_age_steps,
            update=self.update,
            dispatcher=self.dispatcher,
            saver=self.saver,
            thread=thread,
            signals=self.signals,
            gauges=self.gauges,
            records=self.records,
        )
        self.recovery = Recovery(
            run=run,
            run_dir=self.run_dir,
            update=self.update,
            dispatcher=self.dispatcher,
            log=self.log,
            saver=self.saver,
            signals=self.signals,
            gauges=self.gauges,
            records=self.records,
            step_log=self.step_log,
        )
        self.publication = Publication(
            precision=spec.published_precision,
            commands=policy.commands,
            published=self.published,
            tensor_thread=thread,
            dispatcher=self.dispatcher,
            ranks=policy.ranks,
            policies=self.policies,
            weight_server=self.weight_server,
            gauges=self.gauges,
        )
        self.mismatch = MismatchWatch(
            spec=spec, dispatcher=self.dispatcher, signals=self.signals, troubles=self.troubles
        )

    async def run(self, drain_s: float) -> RunPhase:
        """Train until the last step, or until the run leaves the phase `RUNNING`; return the phase.

        A run that is already complete returns at once and needs no workers.

        drain_s: how long a draining run waits for work in flight before the checkpoint.

        Raises:
            MismatchError: if workers and learner do not compute the same policy.
            TooManyFailuresError: if every generation fails; the steps taken so far are saved.
        """
        if self.saver.is_complete:
            await self._end("complete before this start")
            return self.dispatcher.phase
        for warning in algorithm_warnings(self.spec.algorithm):
            self.event("Warning", f"algorithm: {warning}")
        for warning in batch_warnings(self.spec.batch, self.spec.algorithm):
            self.event("Warning", f"batch: {warning}")
        for warning in rollout_warnings(self.spec.model, self.spec.rollouts):
            self.event("Warning", f"rollouts: {warning}")
        await self._until_kept()
        await self.publication.begin()
        try:
            await self._take_steps()
        except TooManyFailuresError as error:
            self.event("Failed", str(error))
            if self.dispatcher.step > 0:
                await self.saver.save()
            raise
        finally:
            # However training ends, the checkpoint on its way reaches the disk.
            await self.saver.join()
        await self._finish(drain_s)
        return self.dispatcher.phase

    def event(self, kind: str, message: str) -> None:
        self.records.event(kind, message)

    async def _until_kept(self) -> None:
        """Wait until the log has this start: then no later one makes versions of its numbers."""
        kept = asyncio.ensure_future(self.log.wait_until_kept())
        while not kept.done() and self.dispatcher.phase is RunPhase.RUNNING:
            await asyncio.wait([kept], timeout=_POLL_S)
        kept.cancel()

    async def _take_steps(self) -> None:
        """Evaluate before the first step; take steps until the last one or until a stop."""
        if self.dispatcher.step == 0:
            with self.gauges.stage(Stage.EVALUATE):
                await self._evaluate(exclusive=True)
        while self.dispatcher.step < self.spec.steps:
            if not await self._step():
                return

    async def _step(self) -> bool:
        """Take one optimizer step; return False if the run is stopped."""
        waiting_since_s = self.clock()
        self.signals.start_waiting()
        groups = await self.publication.unless_it_fails(self.dispatcher.next_batch())
        if groups is None:
            return False
        started_s = self.clock()
        self.signals.start_working()
        version, step = self.dispatcher.policy_version, self.dispatcher.step
        lag_limit_steps = self.dispatcher.lag_limit_at(step)
        result = await self._train_on(groups)
        if result is None:
            return True
        self.mismatch.after_step(result)
        self.dispatcher.advance_version()
        self._observe_warning(result, step + 1)  # before more work is granted
        is_rolled_back = await self.rollback.after_step()
        if is_rolled_back:
            health = self.update.health
            self.dispatcher.observe_health(health.level, health.rollbacks)
        await self.publication.begin()
        finished_s = self.clock()
        record = self._record(
            result,
            groups,
            version,
            lag_limit_steps=lag_limit_steps,
            idle_s=started_s - waiting_since_s,
            step_s=finished_s - started_s,
        )
        self.records.step(record)
        samples = step_samples(record.step, groups, self.tokenizer)
        self.records.samples(record.step, samples, total_steps=self.spec.steps)
        self.signals.record_step(record)
        self._show_update(result)
        self.gauges.record_step(record, groups, result.log_weights)
        next_backoff = self.update.health.backoff.factor  # with a rollback of this step
        for kind, message in self.step_log.events(
            record, result.skip_detail, next_backoff=next_backoff
        ):
            self.event(kind, message)
        if far := far_rewards(record.step, groups, result.reward_limits):
            self.troubles.tell("RewardsFar", far)
        self.step_log.log_if_due(record)
        await self._between_steps(record.step, is_rolled_back=is_rolled_back)
        return True

    def _observe_warning(self, result: UpdateResult, step: int) -> None:
        before, level = self.dispatcher.lag_limit, WarningLevel(result.warning_level)
        self.dispatcher.observe_health(level, before.rollbacks)
        if (steps := self.dispatcher.lag_limit.steps) != before.steps:
            reason = warning_reason(level, result.warning_score, step)
            self.event(ChangeKind.THROTTLED, lag_change_sentence(before.steps, steps, reason))

    async def _train_on(self, groups: Sequence[Lease]) -> UpdateResult | None:
        """Take or skip the update of a batch; return None if none can be taken: it is dropped."""
        version, ledger = self.dispatcher.policy_version, self.dispatcher.ledger
        try:
            pending = await self.thread.run(lambda: self._begin(groups, version))
            # Trajectories that arrived meanwhile are of the version that is still current.
            newest = ledger.newest_trajectories(version, num_tokens=pending.wanted_fresh_tokens)
            result = await self.thread.run(lambda: self._conclude(newest))
        except Exception as error:  # a model's own code may raise anything
            if not self.update.is_whole:
                raise
            self._drop(groups, error)
            return None
        self.troubles.end_row(Trouble.BATCH)
        return result

    def _begin(self, groups: Sequence[Lease], version: int) -> PendingStep:
        batch = self.update.draw([group.trajectories for group in groups])
        return self.update.begin(batch, policy_version=version)

    def _conclude(self, newest: Sequence[Trajectory]) -> UpdateResult:
        """Take the step, in the tensor thread; without what is beside the batch if that breaks it.

        A group that causes errors is found when it is trained on.
        """
        try:
            return self.update.finish(newest)
        except Exception:  # as above
            if newest and self.update.is_whole:
                return self.update.finish(())
            raise

    def _drop(self, groups: Sequence[Lease], error: Exception) -> None:
        """Drop a batch on which no step can be taken; parameters and optimizer are unchanged."""
        ledger, troubles = self.dispatcher.ledger, self.troubles
        ledger.return_batch(groups)
        ledger.drop(groups, DropReason.QUARANTINED)
        self.dispatcher.notify()
        why = f"{type(error).__name__}: {error}"[:500]
        _LOGGER.error("the update fails on a batch", exc_info=error)
        ids = ", ".join(group.lease_id for group in groups)
        text = f"{why}; these groups are not trained on: {ids}"
        if troubles.report(Trouble.BATCH, text, like=why) is Answer.END:
            raise StartError(
                f"the update failed on {troubles.in_a_row(Trouble.BATCH)} batches in a row, on the"
                f" last one with {why}. If memory is short, lower spec.batch.tokensPerMicroBatch,"
                " spec.batch.microBatchTrajectories or spec.sampling.maxNewTokens"
            ) from error

    async def _between_steps(self, step: int, *, is_rolled_back: bool) -> None:
        """Start an evaluation or write a checkpoint, if one is due.

        is_rolled_back: a checkpoint is due then, or a restart would undo the rollback.
        """
        last = step >= self.spec.steps
        if self._evaluation is not None and self._evaluation.done():
            await self._join_evaluation()
        if step % self.spec.evaluation.every_steps == 0 and not last and self._evaluation is None:
            self._evaluation = asyncio.create_task(self._evaluate(exclusive=False))
        if not last:
            await self.saver.save_if_due(is_wanted=is_rolled_back)

    async def _finish(self, drain_s: float) -> None:
        """Evaluate the last version, or wait for work in flight if the run drains; then save."""
        await self.publication.join()
        if (is_stuck := self.log.is_unwritable) and self._evaluation is not None:
            # The log holds up the answers that its workers wait for.
            self._evaluation.cancel()
            await asyncio.wait([self._evaluation])
            if self._evaluation.cancelled():
                self._evaluation = None
                self.event("EvaluationWithoutResult", "it was not over, and the disk is full")
        await self._join_evaluation()
        if self.dispatcher.phase is not RunPhase.RUNNING:
            await self.dispatcher.wait_until_idle(drain_s)
        elif is_stuck:  # nobody could answer
            step, why = self.dispatcher.step, "the redo log has no room for its responses"
            self.event("EvaluationWithoutResult", f"step {step}: {why}")
        else:
            with self.gauges.stage(Stage.EVALUATE):
                await self._evaluate(exclusive=True)
        await self.saver.finish()
        await self._end("the model is saved")

    async def _end(self, how: str) -> None:
        """Judge the run and set the phase `COMPLETE`, unless the run was asked to stop."""
        collapse = ""
        if self.dispatcher.phase is RunPhase.RUNNING:
            metrics = await asyncio.to_thread(self.records.read)
            collapse = lasting_collapse(metrics)
            # Before the phase: who reads COMPLETE reads how the run ended as well.
            self.signals.collapse = collapse
        if self.dispatcher.complete():
            kind, how = ("Collapsed", f"{how}. {collapse}") if collapse else ("Complete", how)
            self.event(kind, f"{self.dispatcher.step} steps; {how}")
        self.publication.close()
        self.thread.shutdown()

    async def _join_evaluation(self) -> None:
        if self._evaluation is not None:
            await self._evaluation
            self._evaluation = None

    async def _evaluate(self, *, exclusive: bool) -> None:
        """Run an evaluation round and record its result."""
        step = self.dispatcher.step
        await self.publication.join()
        result = await self.dispatcher.evaluate(step, exclusive=exclusive)
        if result is None:
            self.event("EvaluationWithoutResult", f"step {step}: no response to a held-out prompt")
            return
        record = result.record
        self.dispatcher.ledger.record_evaluation(record.step, record.accuracy)
        answers = evaluation_samples(record.step, result.first_responses, self.tokenizer)
        self.records.evaluation(record, answers)
        self.signals.accuracy = record.accuracy
        self.gauges.record_evaluation(record, self.dispatcher.ledger.accuracies)
        _LOGGER.info(
            "evaluation of step %d: held-out reward %.3f over %d responses to %d prompts",
            record.step,
            record.accuracy,
            record.num_trajectories,
            record.num_prompts,
            extra={"step": record.step, "accuracy": record.accuracy},
        )

    def _record(
        self,
        result: UpdateResult,
        groups: Sequence[Lease],
        version: int,
        *,
        lag_limit_steps: int,
        idle_s: float,
        step_s: float,
    ) -> StepRecord:
        """Return the record of a step, after the accounting was checked.

        groups: that the step consumed; version: of the parameters before it.
        """
        dispatcher, health = self.dispatcher, self.update.health
        counts = dispatcher.ledger.counts()
        counts.check()
        weight_updates, workers = dispatcher.registry.weight_updates, dispatcher.registry.workers()
        worker_peak_bytes = max((one.peak_memory_bytes for one in workers), default=0)
        return StepRecord(
            step=dispatcher.step,
            time_unix_s=time.time(),
            step_s=step_s,
            idle_s=idle_s,
            stage_s=result.times.by_stage(),
            **window_fields(
                self.signals.steps,
                ess_ratio=result.ess_ratio,
                step_s=step_s,
                idle_s=idle_s,
            ),
            tokens_per_s=self.signals.tokens_per_s(),
            lag_limit_steps=lag_limit_steps,
            workers=len(workers),
            learner_peak_gibibytes=peak_memory_bytes() / 2**30,
            worker_peak_gibibytes=worker_peak_bytes / 2**30,
            ranks=self.spec.learner.ranks,
            weight_updates_in_flight=weight_updates.in_flight,
            adapter_swaps=weight_updates.adapter_swaps,
            merged_versions=weight_updates.merged,
            leased=counts.leased,
            in_flight=counts.in_flight,
            buffered=counts.buffered,
            consumed=counts.consumed,
            dropped=dict(counts.dropped),
            unsaved_steps=dispatcher.step - max(0, self.saver.saved_step),
            rollbacks=health.rollbacks.number,
            **streak_fields(
                self.signals.last_step,
                level=WarningLevel(result.warning_level),
                has_collapsed=health.rewards.has_collapsed,
                skipped=result.skipped,
                lag_limit_steps=lag_limit_steps,
                max_policy_lag_steps=self.spec.algorithm.max_policy_lag_steps,
            ),
            mismatch=self.mismatch.record(result.mismatch),
            **batch_fields(groups, version),
            **update_fields(result),
        )

    def _show_update(self, result: UpdateResult) -> None:
        for stage, duration_s in result.times.by_stage().items():
            self.gauges.add_stage(Stage(stage), duration_s)
        if (memory := result.memory) is not None:
            self.gauges.set_device_memory(memory)
