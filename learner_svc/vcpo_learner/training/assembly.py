"""Builds the training loop of one learner from the learner's parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.api import VCPORun
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.run_records import RunRecords
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.step_log import StepLog
from vcpo_learner.training.loop import TrainingLoop
from vcpo_learner.training.mismatch_watch import MismatchWatch
from vcpo_learner.training.publication import Publication
from vcpo_learner.training.recovery import Recovery
from vcpo_learner.training.rollback import Rollback
from vcpo_learner.training.saving import RunSaver
from vcpo_learner.training.tensor_thread import TensorThread
from vcpo_learner.troubles import Troubles
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingAssembly:
    """What a training loop is built from; `loop` gives each of its parts what that part needs."""

    run: VCPORun
    run_dir: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    update: PolicyUpdate
    commands: Commands
    published: PublishedState
    dispatcher: Dispatcher
    log: RedoLog
    policies: PolicyStore
    ranks: Ranks
    signals: SignalWindow
    gauges: LearnerGauges
    records: RunRecords
    troubles: Troubles
    clock: Clock
    weight_server: WeightServer | None = None
    """None: all workers see the folder of the versions."""

    def loop(self) -> TrainingLoop:
        """Return the loop; call once."""
        spec = self.run.spec
        thread = TensorThread()
        saver = self._saver(thread)
        step_log = StepLog(spec.steps, clock=self.clock)
        return TrainingLoop(
            spec,
            self.tokenizer,
            dispatcher=self.dispatcher,
            log=self.log,
            update=self.update,
            troubles=self.troubles,
            thread=thread,
            saver=saver,
            rollback=self._rollback(saver, thread),
            publication=self._publication(thread),
            recovery=self._recovery(saver, step_log),
            mismatch=MismatchWatch(
                spec=spec,
                dispatcher=self.dispatcher,
                signals=self.signals,
                records=self.records,
            ),
            signals=self.signals,
            gauges=self.gauges,
            records=self.records,
            step_log=step_log,
            clock=self.clock,
        )

    def _saver(self, thread: TensorThread) -> RunSaver:
        name, model = self.run.metadata.name, self.run.spec.model
        return RunSaver(
            self.run,
            self.run_dir,
            ModelExport(name, model, self.model, self.tokenizer),
            update=self.update,
            dispatcher=self.dispatcher,
            log=self.log,
            tensor_thread=thread,
            gauges=self.gauges,
            records=self.records,
            troubles=self.troubles,
        )

    def _rollback(self, saver: RunSaver, thread: TensorThread) -> Rollback:
        return Rollback(
            age_steps=self.run.spec.rollback_age_steps,
            update=self.update,
            dispatcher=self.dispatcher,
            saver=saver,
            tensor_thread=thread,
            signals=self.signals,
            gauges=self.gauges,
            records=self.records,
        )

    def _publication(self, thread: TensorThread) -> Publication:
        return Publication(
            precision=self.run.spec.published_precision,
            commands=self.commands,
            published=self.published,
            tensor_thread=thread,
            dispatcher=self.dispatcher,
            ranks=self.ranks,
            policies=self.policies,
            weight_server=self.weight_server,
            gauges=self.gauges,
        )

    def _recovery(self, saver: RunSaver, step_log: StepLog) -> Recovery:
        return Recovery(
            self.run,
            self.run_dir,
            update=self.update,
            dispatcher=self.dispatcher,
            log=self.log,
            saver=saver,
            signals=self.signals,
            gauges=self.gauges,
            records=self.records,
            step_log=step_log,
        )
