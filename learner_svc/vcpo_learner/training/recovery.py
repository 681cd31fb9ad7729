"""Resumes a run, from its newest intact checkpoint and the redo log, and rolls one back.

The learner goes on from step s of the checkpoint, with the ledger that was lost but for the steps:
their groups wait again. It publishes the parameters as a version of its own
(`vcpo.wire.versions`), because those of the steps that are lost named other parameters.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcpo.algo.health.guards import MAX_ROLLBACKS, RollbackNeed
from vcpo.api import VCPORun, continuation_document
from vcpo.metrics.label_values import Stage
from vcpo.records.journal import METRICS_FILE
from vcpo.records.reasons import DropReason
from vcpo.records.step_record import StepRecord
from vcpo_learner.checkpoints.folder import Checkpoint, require_same_spec
from vcpo_learner.checkpoints.manifest import CheckpointError
from vcpo_learner.event_loop import TensorThread
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.step_log import RunRecords, StepLog
from vcpo_learner.training.saving import RunSaver
from vcpo_learner.update.policy_update import PolicyUpdate


@dataclass(slots=True, kw_only=True, eq=False)
class Recovery:
    """Resumes one run. Owner: the event loop."""

    run: VCPORun
    run_dir: Path
    update: PolicyUpdate
    dispatcher: Dispatcher
    log: RedoLog
    saver: RunSaver
    signals: SignalWindow
    gauges: LearnerGauges
    records: RunRecords
    step_log: StepLog

    def require_unused(self) -> None:
        held = ""
        if steps := self.saver.checkpoints.steps():
            held = f"a checkpoint of step {steps[-1]}"
        elif self.log.is_used:
            held = "a redo log with accepted trajectories"
        if held:
            raise CheckpointError(
                f"--run-dir: {self.run_dir} holds {held}; add --resume, or give another directory"
            )
        self.log.set_spec(continuation_document(self.run))

    def resume(self) -> int:
        """Load the newest intact checkpoint and the log after it; return the checkpoint's step.

        Returns 0 if there is no checkpoint.
        """
        log, spec = self.log, continuation_document(self.run)
        if log.spec is not None:
            require_same_spec(log.path, log.spec, spec)
        checkpoint = self._load_newest()
        step = 0 if checkpoint is None else checkpoint.step
        records = self.records.read().steps
        num_lost = self._redo(checkpoint, records)
        log.set_spec(spec)
        if checkpoint is None and log.position == 0:
            return 0
        self.dispatcher.ledger.restart(num_lost)
        self.dispatcher.resume()
        self._go_on([one for one in records if one.step <= step])
        if checkpoint is not None:
            self.saver.saved_step = step
            self.gauges.record_resume(
                now_unix_s=time.time(),
                saved_unix_s=self.saver.checkpoints.path(step).stat().st_mtime,
            )
        where = (
            "without a checkpoint" if checkpoint is None else f"from the checkpoint of step {step}"
        )
        waiting = self.dispatcher.ledger.counts().buffered
        version = self.dispatcher.policy_version
        self.records.event(
            "Resumed", f"{where}, as version {version}; {waiting} accepted trajectories wait"
        )
        return step

    def _load_newest(self) -> Checkpoint | None:
        """Load the newest intact checkpoint; return None if there is none, and the log needs none.

        Raises: as `resume`.
        """
        checkpoints, ledger = self.saver.checkpoints, self.dispatcher.ledger
        checkpoint, damaged = checkpoints.load_newest()
        if checkpoint is None:
            if not (step := self.log.first_step):
                return None
            raise CheckpointError(
                f"{self.run_dir / 'checkpoints'}: holds no checkpoint, and {self.log.path} goes"
                f" on from one of step {step}: put its folder back, or train from the start in"
                " another --run-dir (in a cluster: as another VCPORun)"
            )
        for one in damaged:
            self.records.event("CheckpointDamaged", f"{one}; resuming from step {checkpoint.step}")
        checkpoints.set_aside(damaged)
        self.update.load_tensors(folder=checkpoint.tensors)
        self.update.load_state_dict(checkpoint.update_state)
        ledger.restore(checkpoint.ledger)
        return checkpoint

    def _redo(self, checkpoint: Checkpoint | None, records: Sequence[StepRecord]) -> int:
        """Apply the changes after a checkpoint; report those that are missing, return how many.

        A log that lost its end looks like one that ends earlier; the journal may know better.
        """
        log, ledger = self.log, self.dispatcher.ledger
        step, after = 0, 0
        if checkpoint is not None:
            step, after = checkpoint.step, checkpoint.ledger[0].log_position
        missing, num_lost = log.redo(ledger.replay, after=after, step=step)
        if records:
            last = max(records, key=lambda record: record.time_unix_s)
            # What was in flight may be in the journal and not in the log.
            more = last.leased - last.in_flight - ledger.counts().leased
            if more > 0:
                group_size = self.run.spec.batch.trajectories_per_prompt
                num_lost = max(num_lost, math.ceil(more / group_size))
                known = f"step {last.step} of {METRICS_FILE} knows of {more} more trajectories"
                missing = f"{missing or log.path}; {known}"
        if missing:
            lost = f"{num_lost} later ones, which were committed, are lost"
            self.records.event("LogDamaged", f"{missing}, and at least {lost}")
        self.signals.lost_changes = num_lost
        return num_lost

    def _go_on(self, records: Sequence[StepRecord]) -> None:
        """Let limits and signals go on from the checkpoint; what came before is no news.

        records: up to the checkpoint. They tell people and signals what was; no decision of
            training reads them.
        """
        health = self.update.health
        self.dispatcher.observe_health(health.level, health.rollbacks)
        self.step_log.resume(
            health.level, rate_factor=health.backoff.factor, rollbacks=health.rollbacks.number
        )
        self.signals.resume(records)
        self.gauges.skip_counted()


@dataclass(slots=True, kw_only=True, eq=False)
class Rollback:
    """Rolls one run back when its guards ask for it. Owner: the event loop.

    Model and optimizer become those of the last good checkpoint. The next version is published with
    them, and a checkpoint of the present step is written, so that a restart does not undo it. The
    version, the ledger, the prompts and the journal go on, so no response is trained on twice.
    Responses that the given-up weights sampled are dropped or kept out.
    """

    age_steps: int
    """Least age of a checkpoint that the run may go back to."""
    update: PolicyUpdate
    dispatcher: Dispatcher
    saver: RunSaver
    thread: TensorThread
    signals: SignalWindow
    gauges: LearnerGauges
    records: RunRecords
    _is_refused: bool = False
    """Whether it was said that a rollback is needed and cannot be done."""

    async def after_step(self) -> bool:
        """Roll the run back if its guards ask for it; return whether it was.

        Call it when the version is raised and not yet published.
        """
        health = self.update.health
        need = health.rollback_need
        if need is RollbackNeed.NONE:
            self._is_refused = False
        if need is RollbackNeed.NONE or self._is_refused:
            return False
        if need is RollbackNeed.USED_UP:
            self._refuse(f"it was rolled back {health.rollbacks.number} times, the most allowed")
            return False
        with self.gauges.stage(Stage.CHECKPOINT):
            checkpoint = await self._last_good()
            if checkpoint is None:
                self._refuse(f"no good checkpoint is at least {self.age_steps} steps old")
                return False
            await self._go_back_to(checkpoint)
        return True

    async def _last_good(self) -> Checkpoint | None:
        """Read the newest intact checkpoint that is good and old enough; None if there is none."""
        await self.saver.join()  # the one on its way may be it
        folder, latest = self.saver.checkpoints, self._step - self.age_steps
        for step in reversed(await asyncio.to_thread(folder.healthy_steps)):
            if step <= latest:
                with contextlib.suppress(CheckpointError):
                    return await asyncio.to_thread(folder.load, step)
        return None

    async def _go_back_to(self, checkpoint: Checkpoint) -> None:
        step, why = self._step, self._why()
        health, state = self.update.health, checkpoint.update_state
        state["warning"] = health.rolled_back_state(state["warning"], version=step)

        def restore() -> None:
            self.update.load_tensors(folder=checkpoint.tensors)
            self.update.load_state_dict(state)

        await self.thread.run(restore)
        ledger = self.dispatcher.ledger
        ledger.drop(ledger.buffer.groups(), DropReason.ROLLED_BACK)
        self.signals.record_rollback(
            f"rollback from step {step} to the checkpoint of step {checkpoint.step}, because {why}"
        )
        self.records.event(
            "RolledBack",
            f"step {step}: {why}. Model and optimizer are those of step {checkpoint.step} again,"
            f" the learning rate goes on at x {health.backoff.factor:g}, and what older versions"
            f" sampled is dropped; rollback {health.rollbacks.number} of at most"
            f" {MAX_ROLLBACKS}",
        )

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self.gauges.metrics.rollbacks_refused.inc()
        self.records.event(
            "NotRolledBack", f"step {self._step}: {self._why()}; the run goes on as it is: {reason}"
        )

    def _why(self) -> str:
        """Return why a rollback is needed, as a clause."""
        health = self.update.health
        if health.rewards.has_collapsed:
            return health.rewards.fall
        return f"the early warning is {health.level} (score {health.score:.2f})"

    @property
    def _step(self) -> int:
        return self.dispatcher.step
