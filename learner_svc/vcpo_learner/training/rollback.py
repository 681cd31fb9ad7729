"""Rolls a run back: its model and optimizer become those of the last good checkpoint.

The next version is published with them, and a checkpoint of the present step is written, so that a
restart does not undo it. The version, the ledger, the prompts and the journal go on, so no response
is trained on twice. Responses that the given-up weights sampled are dropped or kept out.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from vcpo.algo.health.guards import MAX_ROLLBACKS, RollbackNeed
from vcpo.metrics.label_values import Stage
from vcpo.records.reasons import DropReason
from vcpo_learner.checkpoints.folder import Checkpoint
from vcpo_learner.checkpoints.manifest import CheckpointError
from vcpo_learner.event_loop import TensorThread
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.step_log import RunRecords
from vcpo_learner.training.saving import RunSaver
from vcpo_learner.update.policy_update import PolicyUpdate


@dataclass(slots=True, kw_only=True, eq=False)
class Rollback:
    """Rolls one run back when its guards ask for it. Owner: the event loop."""

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
        self.gauges.count_refused_rollback()
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
