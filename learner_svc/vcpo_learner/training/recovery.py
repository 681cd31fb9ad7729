"""Resumes a run: from its newest intact checkpoint, and from the redo log after it.

The learner goes on from step s of the checkpoint, with the ledger that was lost but for the steps:
their groups wait again. It publishes the parameters as a version of its own
(`vcpo.wire.versions`), because those of the steps that are lost named other parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcpo.api import VCPORun, continuation_document
from vcpo.records.journal import METRICS_FILE
from vcpo.records.step_record import StepRecord
from vcpo_learner.checkpoints.folder import Checkpoint, require_same_spec
from vcpo_learner.checkpoints.manifest import CheckpointError
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
