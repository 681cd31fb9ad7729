"""The parts that the training loop and the run saver use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.api import VCPORun
from vcpo.metrics.label_values import MemoryState, Stage
from vcpo.records.event_level import event_level
from vcpo.records.journal import (
    JOURNAL_DAMAGED,
    DamagedLine,
    EventRecord,
    Journal,
    read_events,
)
from vcpo.tracking.tracker import Tracker
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.redo_log.log import RedoLog
from vcpo_learner.redo_log.progress import DISK_FULL
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.telemetry.traces import TrajectoryTraces
from vcpo_learner.training.mirrored_update import MirroredUpdate
from vcpo_learner.update.result import UpdateResult
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.archive import ArchiveWriter
from vcpo_learner.weights.store import PolicyStore

_LOGGER = logging.getLogger(__name__)
_LINES_NAMED = 10
"""Most damaged lines that get an event each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """The parts of one learner; each class names its owner."""

    run: VCPORun
    run_dir: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    update: MirroredUpdate
    dispatcher: Dispatcher
    log: RedoLog
    policies: PolicyStore
    ranks: Ranks
    signals: SignalWindow
    gauges: LearnerGauges
    journal: Journal
    clock: Clock
    tracker: Tracker = field(default_factory=Tracker)
    archive_writer: ArchiveWriter | None = None
    weight_server: WeightServer | None = None
    """Sends the versions; None: the learner's own server does."""
    traces: TrajectoryTraces = field(default_factory=TrajectoryTraces)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits a number of seconds of `clock`."""
    end_within: Callable[[float], None] = lambda _: None
    """Ends the process after a number of seconds, whatever its threads do."""

    def event(self, kind: str, message: str) -> None:
        """Write an event to the journal, the log and the run's sinks."""
        _LOGGER.log(event_level(kind), "%s: %s", kind, message, extra={"event": kind})
        record = EventRecord(time_unix_s=time.time(), source="learner", kind=kind, message=message)
        self.journal.event(record)
        self.tracker.put(record)

    def report_damage(self, damaged: Sequence[DamagedLine]) -> None:
        """Name damaged lines of the journal by an event each, and count them; each one once."""
        if not damaged:
            return
        notices = [each.notice for each in damaged[:_LINES_NAMED]]
        if len(damaged) > _LINES_NAMED:
            notices.append(f"{damaged[0].file}: {len(damaged):,} lines are damaged in all")
        told = {event.message for event in read_events(self.run_dir)}
        for notice in notices:
            if notice not in told:
                self.event(JOURNAL_DAMAGED, notice)

    def report_log(self) -> None:
        """Write the events of the redo log since the last call."""
        for kind, message in self.log.take_events():
            if kind == DISK_FULL:
                self.gauges.count_disk_full()
            self.event(kind, message)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Count the time until the end of the block as a stage of the learner's work."""
        started_s = self.clock()
        try:
            yield
        finally:
            self.gauges.add_stage(stage, self.clock() - started_s)

    def record_update(self, result: UpdateResult) -> None:
        """Show the time that an update took by stage, and the memory of its GPU."""
        times, memory = result.times, result.memory
        for stage, duration_s in times.by_stage().items():
            self.gauges.add_stage(Stage(stage), duration_s)
        if memory is not None:
            self.gauges.set_device_memory(
                {
                    MemoryState.ALLOCATED: memory.allocated,
                    MemoryState.RESERVED: memory.reserved,
                    MemoryState.PEAK: memory.peak,
                }
            )
