"""The seam between the ledger and what keeps it: the ledger emits changes, a log keeps them."""

from __future__ import annotations

from typing import Protocol

from vcpo.wire.v1 import ledger_pb2, work_pb2

Change = (
    ledger_pb2.LeaseGranted
    | work_pb2.SubmitRequest
    | ledger_pb2.LeaseEnded
    | ledger_pb2.GroupsDropped
    | ledger_pb2.Evaluated
    | ledger_pb2.LagLimit
    | ledger_pb2.LearnerRestarted
)


class InconsistentChangeError(ValueError):
    """A change does not fit the ledger that it is applied to; the message says why."""


class ChangeLog(Protocol):
    """Where the ledger writes its changes. Owner: the learner's event loop."""

    @property
    def is_unwritable(self) -> bool:
        """Whether the disk is full or fails: changes wait in memory."""

    def append(self, change: Change) -> None:
        """Take a change; it is written in the background, after all earlier ones."""

    def cut(self, step: int) -> int:
        """Begin another file, at the snapshot of a step; return the newest change's number."""

    async def wait_until_kept(self) -> None:
        """Wait until every change so far outlives this process."""

    def check(self) -> None:
        """Raise what ended the log, if it ended."""


class NoLog:
    """The log of a ledger that does not outlive its process."""

    position = 0
    is_unwritable = False

    def append(self, change: Change) -> None:
        pass

    def cut(self, step: int) -> int:
        return self.position

    async def wait_until_kept(self) -> None:
        pass

    def check(self) -> None:
        pass
