"""The parts that the training loop and the run saver use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.records.event_level import event_level
from vcpo.records.journal import EventRecord, Journal
from vcpo.spec import VCPORun
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.weights.archive import ArchiveWriter
from vcpo_learner.weights.store import PolicyStore

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The parts of one learner; each class names its owner."""

    run: VCPORun
    run_dir: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    update: PolicyUpdate
    dispatcher: Dispatcher
    policies: PolicyStore
    signals: SignalWindow
    gauges: LearnerGauges
    journal: Journal
    clock: Clock
    archive_writer: ArchiveWriter | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits a number of seconds of `clock`."""

    def event(self, kind: str, message: str) -> None:
        """Write an event to the journal and to the log."""
        _LOGGER.log(event_level(kind), "%s: %s", kind, message, extra={"event": kind})
        record = EventRecord(time_unix_s=time.time(), source="learner", kind=kind, message=message)
        self.journal.event(record)
