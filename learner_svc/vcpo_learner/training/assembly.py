"""Builds the training loop of one learner from the learner's parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.api import VCPORun
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.redo_log.log import RedoLog
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.run_records import RunRecords
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.step_log import StepLog
from vcpo_learner.telemetry.traces import TrajectoryTraces
from vcpo_learner.training.loop import TrainingLoop
from vcpo_learner.training.mirrored_update import MirroredUpdate
from vcpo_learner.training.mismatch_watch import MismatchWatch
from vcpo_learner.training.publication import Publication
from vcpo_learner.training.quarantine import Exclusion, Quarantine
from vcpo_learner.training.recovery import Recovery
from vcpo_learner.training.rollback import Rollback
from vcpo_learner.training.saving import RunSaver
from vcpo_learner.training.step_guard import StepGuard
from vcpo_learner.training.tensor_thread import StuckWorkError, TensorThread
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore

_LOGGER = logging.getLogger(__name__)
_END_S: Final = 60.0
"""Time in which the process of a stuck thread ends in order; then it ends at once."""


def training_loop(
    run: VCPORun,
    run_dir: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    update: MirroredUpdate,
    dispatcher: Dispatcher,
    log: RedoLog,
    policies: PolicyStore,
    ranks: Ranks,
    signals: SignalWindow,
    gauges: LearnerGauges,
    records: RunRecords,
    traces: TrajectoryTraces,
    clock: Clock,
    weight_server: WeightServer | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    end_within: Callable[[float], None] = lambda _: None,
) -> TrainingLoop:
    """Return the loop; each of the parts names its owner.

    sleep: waits a number of seconds of `clock`.
    end_within: ends the process after a number of seconds, whatever its threads do.
    """

    def report_stuck(error: StuckWorkError) -> None:
        """Say where the tensor thread stands, and see to it that the process ends."""
        end_within(_END_S)
        update.give_up()
        _LOGGER.error("%s", error.where)
        records.event("LearnerStuck", str(error))

    spec = run.spec
    thread = TensorThread(spec, clock, report_stuck)
    quarantine = Quarantine(run_dir / "quarantine")
    exclusion = Exclusion(
        update=update, ledger=dispatcher.ledger, records=records, quarantine=quarantine
    )
    saver = RunSaver(
        run,
        run_dir,
        ModelExport(run.metadata.name, spec.model, model, tokenizer),
        update=update,
        dispatcher=dispatcher,
        log=log,
        tensor_thread=thread,
        gauges=gauges,
        records=records,
        clock=clock,
        sleep=sleep,
    )
    step_log = StepLog(spec.steps, clock=clock)
    return TrainingLoop(
        spec,
        tokenizer,
        dispatcher=dispatcher,
        log=log,
        health=update.health,
        guard=StepGuard(update, quarantine),
        thread=thread,
        exclusion=exclusion,
        saver=saver,
        rollback=Rollback(
            age_steps=spec.rollback_age_steps,
            update=update,
            dispatcher=dispatcher,
            saver=saver,
            tensor_thread=thread,
            signals=signals,
            gauges=gauges,
            records=records,
        ),
        publication=Publication(
            spec.published_precision,
            update=update,
            tensor_thread=thread,
            dispatcher=dispatcher,
            ranks=ranks,
            policies=policies,
            weight_server=weight_server,
            gauges=gauges,
            traces=traces,
            clock=clock,
            sleep=sleep,
        ),
        recovery=Recovery(
            run,
            run_dir,
            update=update,
            dispatcher=dispatcher,
            log=log,
            saver=saver,
            quarantine=quarantine,
            exclusion=exclusion,
            signals=signals,
            gauges=gauges,
            records=records,
            step_log=step_log,
        ),
        mismatch=MismatchWatch(
            spec, dispatcher=dispatcher, signals=signals, records=records, clock=clock
        ),
        signals=signals,
        gauges=gauges,
        records=records,
        traces=traces,
        step_log=step_log,
        clock=clock,
    )
