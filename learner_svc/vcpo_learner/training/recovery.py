"""Resumes a run: from its newest intact checkpoint, and from the redo log after it.

```
checkpoint of step s    parameters, ledger      log    changes of the ledger, steps s+1 to n
        |                                        |
        +--> the ledger at the end of the log <--+     at once, before workers are served
        +--> parameters s ---- steps s+1 to n redone --> parameters n     by the training loop
```

The ledger is that of the learner that stopped, and its leases end. A redone step has the batch and
the calibration that the log names, so where the hardware repeats its sums, the parameters are the
same bit for bit. A group that kills the learner while a step is redone comes into quarantine; its
step has no such batch any more, so the run goes back to the version before.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from vcpo.api import VCPORun, continuation_document
from vcpo.records.step_record import StepRecord
from vcpo_learner.checkpoints.folder import Checkpoint, require_same_spec
from vcpo_learner.checkpoints.manifest import CheckpointError
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.redo_log.log import RedoLog
from vcpo_learner.redo_log.redo import LoggedStep
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.run_records import RunRecords
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.step_log import StepLog
from vcpo_learner.training.quarantine import Exclusion, Quarantine
from vcpo_learner.training.saving import RunSaver
from vcpo_learner.update.policy_update import PolicyUpdate


class Recovery:
    """Resumes one run. Owner: the event loop."""

    def __init__(
        self,
        run: VCPORun,
        run_dir: Path,
        *,
        update: PolicyUpdate,
        dispatcher: Dispatcher,
        log: RedoLog,
        saver: RunSaver,
        quarantine: Quarantine,
        exclusion: Exclusion,
        signals: SignalWindow,
        gauges: LearnerGauges,
        records: RunRecords,
        step_log: StepLog,
    ) -> None:
        self.steps: list[LoggedStep] = []
        """Steps after the checkpoint that are still to be redone, in this order."""
        self.last_recorded_step = 0
        """Last step in the journal at the start."""
        self._run = run
        self._run_dir = run_dir
        self._update = update
        self._dispatcher = dispatcher
        self._log = log
        self._signals = signals
        self._gauges = gauges
        self._records = records
        self._saver = saver
        self._quarantine = quarantine
        self._exclusion = exclusion
        self._step_log = step_log

    def require_unused(self) -> None:
        """Check that the run directory holds nothing of another run.

        Raises:
            CheckpointError: naming the directory and the cure.
        """
        held = ""
        if steps := self._saver.checkpoints.steps():
            held = f"a checkpoint of step {steps[-1]}"
        elif self._log.is_used:
            held = "a redo log with accepted trajectories"
        if held:
            raise CheckpointError(
                f"--run-dir: {self._run_dir} holds {held}; add --resume, or give another directory"
            )
        self._log.set_spec(continuation_document(self._run))

    def resume(self) -> int:
        """Load the newest intact checkpoint and the log after it; return the checkpoint's step.

        Returns 0 if there is no checkpoint.

        Raises:
            CheckpointError: if there are checkpoints and none can be used, or there is none and the
                log goes on from one, or the spec is another.
        """
        log, spec = self._log, continuation_document(self._run)
        if log.spec is not None:
            require_same_spec(log.path, log.spec, spec)
        checkpoint, damaged = self._saver.checkpoints.load_newest()
        if checkpoint is not None:
            for one in damaged:
                self._records.event(
                    "CheckpointDamaged", f"{one}; resuming from step {checkpoint.step}"
                )
            self._saver.checkpoints.set_aside(damaged)
            self._load(checkpoint)
        else:
            self._require_whole_log()
        step, after = 0, 0
        if checkpoint is not None:
            step, after = checkpoint.step, checkpoint.ledger[0].log_position
        self.last_recorded_step = max((one.step for one in self._read_records()), default=0)
        self._redo_changes(step, after)
        log.set_spec(spec)
        if checkpoint is None and log.position == 0:
            return 0
        self._dispatcher.ledger.restart()
        self._leave_out(self._quarantine.excluded_lease_ids(), step)
        self._check_consumed(step)
        self._dispatcher.resume_at(step)
        if not self.steps:
            self._go_on()
        self._report(step)
        if checkpoint is not None:
            self._saver.saved_step = step
            self._gauges.record_resume(
                step,
                now_unix_s=time.time(),
                saved_unix_s=self._saver.checkpoints.path(step).stat().st_mtime,
            )
        self._records.event("Resumed", self._description(checkpoint))
        return step

    def end_redo(self, step: int) -> None:
        """Let limits and signals go on from the last step that was redone."""
        self._go_on()
        self._report(step)

    def stop_redo(self, reasons: Mapping[str, str]) -> None:
        """Leave out groups that break the next step; the run goes on from the version before it.

        reasons: why, by lease.
        """
        version = self.steps[0].policy_version
        self._go_back(0)
        self._exclusion.exclude(reasons, reasons, version)

    def _require_whole_log(self) -> None:
        """Check that a run without a checkpoint has a log that begins at its start.

        Raises:
            CheckpointError: with the cure.
        """
        log = self._log
        if log.is_from_start:
            return
        folder = self._run_dir / "checkpoints"
        steps = ", ".join(map(str, log.checkpoint_steps))
        raise CheckpointError(
            f"{folder}: holds no checkpoint, and {log.path} goes on from"
            f" one{steps and f' of step {steps}'}: put its folder back, or train from the start in"
            " another --run-dir (in a cluster: as another VCPORun)"
        )

    def _load(self, checkpoint: Checkpoint) -> None:
        self._update.load_tensors(folder=checkpoint.tensors)
        self._update.load_state_dict(checkpoint.update_state)
        self._dispatcher.ledger.restore(checkpoint.ledger)

    def _redo_changes(self, step: int, after: int) -> None:
        ledger, log = self._dispatcher.ledger, self._log
        redo = log.redo(ledger, after=after, recorded_step=self.last_recorded_step)
        self._signals.record_lost_changes(log.lost_changes)
        self.steps = [each for version, each in sorted(redo.steps.items()) if version >= step]
        for kind, message in log.take_events():
            self._records.event(kind, message)

    def _go_on(self) -> None:
        """Let the lag limit go on from the step of ledger and parameters.

        While steps are redone the ledger is ahead of the parameters, and so is its limit.
        """
        health = self._update.health
        self._dispatcher.observe_health(health.level, health.rollbacks)

    def _report(self, step: int) -> None:
        """Let the signals go on from a step; what came before is no news."""
        health = self._update.health
        self._step_log.resume(
            health.level, rate_factor=health.backoff.factor, rollbacks=health.rollbacks.number
        )
        self._signals.resume([one for one in self._read_records() if one.step <= step])
        self._gauges.skip_counted()

    def _leave_out(self, lease_ids: Collection[str], step: int) -> None:
        """Exclude groups; if a recorded step needs one of them, go back to before that step."""
        for number, recorded in enumerate(self.steps):
            if any(group.lease_id in lease_ids for group in recorded.groups):
                self._go_back(number)
                break
        self._exclusion.exclude(lease_ids, {}, step)

    def _go_back(self, number: int) -> None:
        """Redo no more than a number of steps; the groups of later ones are buffered again."""
        later, self.steps = self.steps[number:], self.steps[:number]
        version = later[0].policy_version
        read = [self._log.read_step(step) for step in later]
        self._dispatcher.ledger.roll_back(version, [one for step in read for one in step.groups])
        self._records.event(
            "RedoStopped",
            f"step {version + 1} cannot be redone without a group in quarantine: the run goes on"
            f" from step {version}, and {len(later)} steps are taken with other batches",
        )

    def _check_consumed(self, step: int) -> None:
        """Check that B trajectories were consumed for each version, as admission assumes.

        A step consumes one batch and makes one version, and a checkpoint is written between steps.
        So admission needs no other base after a restart.

        Raises:
            CheckpointError: with both numbers.
        """
        version = step + len(self.steps)
        expected = version * self._run.spec.batch.trajectories
        consumed = self._dispatcher.ledger.counts().consumed
        if consumed != expected:
            raise CheckpointError(
                f"step {version}: {consumed} trajectories consumed, must be {expected}; remove the"
                f" checkpoint of step {step} to resume from the one before"
            )

    def _description(self, checkpoint: Checkpoint | None) -> str:
        where = (
            "without a checkpoint"
            if checkpoint is None
            else (f"from the checkpoint of step {checkpoint.step}")
        )
        waiting = self._dispatcher.ledger.counts().buffered
        return (
            f"{where}; {len(self.steps)} later steps are redone, and {waiting} accepted"
            " trajectories wait"
        )

    def _read_records(self) -> Sequence[StepRecord]:
        """Return the records of all steps, by step, also of those that are redone.

        They tell people and signals what was; no decision of training reads them.
        """
        return self._records.read().steps
