"""A step that the log has and that is to be taken again: what it needs is read when it is taken.

A log may hold many times what fits into memory, and a redo takes one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.changes import Change, TrajectoriesAccepted
from vcpo_learner.ledger.contents import RecordedStep
from vcpo_learner.ledger.groups import Group

ReadChanges = Callable[[Sequence[int]], Iterable[Change]]
"""Reads the changes at some positions of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTrajectory:
    """A trajectory that is in the log only."""

    trajectory_id: str
    position: int
    """Of the change that brought it."""
    worker_id: str | None
    """As its lease has it; the change does not say it."""


Member = Trajectory | LoggedTrajectory
"""A trajectory of a step: of the checkpoint, which is in memory, or of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step as a redo has found it, without the trajectories that the log has."""

    policy_version: int
    """Of the parameters before the step."""
    groups: tuple[Group, ...]
    """The batch, in its order; without the trajectories."""
    members: tuple[tuple[Member, ...], ...]
    """The trajectories of each group."""
    fresh: tuple[Member, ...] = ()
    """Trajectories beside the batch that calibrated it."""

    def trajectory_ids(self) -> Iterator[str]:
        """Yield the ids of the batch."""
        for each in chain.from_iterable(self.members):
            yield each.trajectory_id

    def read(self, read_changes: ReadChanges) -> RecordedStep:
        """Read the trajectories, and return what the step was computed from.

        Raises: what the log raises if it cannot be read any more.
        """
        logged = [
            each
            for each in (*chain.from_iterable(self.members), *self.fresh)
            if isinstance(each, LoggedTrajectory)
        ]
        wanted = {each.trajectory_id for each in logged}
        found = {
            each.trajectory_id: each
            for change in read_changes(sorted({each.position for each in logged}))
            if isinstance(change, TrajectoriesAccepted)
            for each in change.trajectories
            if each.trajectory_id in wanted
        }

        def whole(members: Iterable[Member]) -> tuple[Trajectory, ...]:
            return tuple(
                replace(found[each.trajectory_id], worker_id=each.worker_id)
                if isinstance(each, LoggedTrajectory)
                else each
                for each in members
            )

        return RecordedStep(
            policy_version=self.policy_version,
            groups=tuple(
                replace(group, trajectories=whole(members))
                for group, members in zip(self.groups, self.members, strict=True)
            ),
            fresh=whole(self.fresh),
        )
