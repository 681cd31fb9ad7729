"""The seam between the ledger and whatever keeps it: the ledger emits changes, a log keeps them.

The ledger changes only by a `Change`, a message of ledger.proto. A learner writes each of them into
its log (`vcpo_learner.redo_log`). The learner after it applies the same changes to the ledger of
the last checkpoint (`LedgerContents.replay`), and so has the ledger that was lost. Beside the
ledger, only those name the log that save a run, resume it and take its steps again.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from vcpo.wire.v1 import ledger_pb2, work_pb2

Change = (
    ledger_pb2.LeaseGranted
    | work_pb2.SubmitRequest
    | ledger_pb2.LeaseEnded
    | ledger_pb2.GroupsDropped
    | ledger_pb2.BatchConsumed
    | ledger_pb2.VersionPublished
    | ledger_pb2.Evaluated
    | ledger_pb2.LagLimit
    | ledger_pb2.LearnerRestarted
    | ledger_pb2.RolledBack
)


class InconsistentChangeError(ValueError):
    """A change does not fit the ledger that it is applied to; the message says why."""


class LogRoom(Enum):
    """Whether the log has room for more changes."""

    FREE = "free"
    FULL = "full"
    """It has reached its limit; the next checkpoint makes room."""
    UNWRITABLE = "unwritable"
    """Its disk is full or fails; changes wait in memory."""


class ChangeLog(Protocol):
    """Where the ledger writes its changes. Owner: the learner's event loop."""

    @property
    def position(self) -> int:
        """Number of the newest change; 0 before the first."""

    @property
    def room(self) -> LogRoom:
        """Whether there is room for more changes."""

    def append(self, change: Change) -> None:
        """Take a change; it is written at once or in the background, after all earlier ones."""

    async def wait_until_kept(self) -> None:
        """Wait until every change so far outlives this process."""

    def check(self) -> None:
        """Raise what ended the log, if it ended."""


class NoLog:
    """The log of a ledger that does not outlive its process."""

    position = 0
    room = LogRoom.FREE

    def append(self, change: Change) -> None:
        """Discard the change."""

    async def wait_until_kept(self) -> None:
        """Return at once."""

    def check(self) -> None:
        """Return: it does not end."""
