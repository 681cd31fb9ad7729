"""The changes of the ledger, as records: the ledger changes only by applying one.

A learner writes each record into its redo log (`vcpo_learner.redo_log`). The learner after it
applies the same records to the ledger of the last checkpoint, and so has the ledger that was lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from vcpo.algo import Rollbacks, WarningLevel
from vcpo.records.reasons import DropReason
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import work_pb2


class InconsistentChangeError(ValueError):
    """A change does not fit the ledger that it is applied to; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted:
    """A worker got a lease."""

    lease_id: str
    worker_id: str
    grant_number: int
    prompt_index: int
    policy_version: int
    oldest_version: int
    """Partial responses and kept trajectories with an older token are discarded."""
    is_requeued: bool
    """Whether it is the first requeued prompt; otherwise the prompt source chose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesAccepted:
    """Trajectories of an open lease arrived; those that had arrived before change nothing."""

    lease_id: str
    trajectories: tuple[Trajectory, ...]
    request: work_pb2.SubmitRequest | None = field(default=None, compare=False, repr=False)
    """The request that brought them, which becomes bytes faster than they do; None if there was
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """A lease ended before all of its trajectories arrived."""

    lease_id: str
    reason: DropReason
    partial_responses: tuple[PartialResponse, ...] = ()
    """What the worker sampled; if empty, the prompt keeps those that it was leased with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsDropped:
    """Buffered groups were dropped; unless their prompts may be at fault, they are requeued."""

    lease_ids: tuple[str, ...]
    reason: DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConsumed:
    """An optimizer step was taken, or skipped, on a batch."""

    policy_version: int
    """Of the parameters before the step."""
    lease_ids: tuple[str, ...]
    """The groups of the batch, in its order."""
    fresh_trajectory_ids: tuple[str, ...] = ()
    """Trajectories beside the batch that calibrated the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """A policy version was announced."""

    policy_version: int
    checksum: int
    """Of all tensors, 64 bits."""
    num_ranks: int = 1
    """Ranks that computed it."""
    num_shards: int = 1
    """Shards that they published it in."""

    def is_comparable_with(self, other: VersionPublished) -> bool:
        """Whether checksums of equal parameters would be equal.

        Another number of ranks adds up in another order, and other shards have other checksums.
        """
        return (self.num_ranks, self.num_shards) == (other.num_ranks, other.num_shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation ended."""

    step: int
    """Steps taken when it began."""
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LagLimitLeft:
    """What host, early warning and rollbacks left the lag limit at; see `LagLimit`."""

    steps: int
    """Limit of host and warning, in policy versions."""
    level: WarningLevel
    """Early warning after the newest step."""
    rollbacks: Rollbacks


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRestarted:
    """A learner began where another one had stopped: the open leases ended."""

    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The run went back to an earlier version: later steps do not count."""

    policy_version: int
    returns_groups: bool
    """Whether the groups that the later steps consumed may be trained on again. Those with a token
    of a later version may not: nobody has these parameters any more."""


Change = (
    LeaseGranted
    | TrajectoriesAccepted
    | LeaseEnded
    | GroupsDropped
    | BatchConsumed
    | VersionPublished
    | Evaluated
    | LagLimitLeft
    | LearnerRestarted
    | RolledBack
)


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

    async def committed(self) -> None:
        """Wait until every change so far outlives this process."""

    def check(self) -> None:
        """Raise what ended the log, if it ended."""


class NoLog:
    """The log of a ledger that does not outlive its process."""

    position = 0
    room = LogRoom.FREE

    def append(self, change: Change) -> None:
        """Discard the change."""

    async def committed(self) -> None:
        """Return at once."""

    def check(self) -> None:
        """Return: it does not end."""
