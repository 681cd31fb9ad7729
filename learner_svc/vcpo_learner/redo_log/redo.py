"""Replays changes: makes the ledger that a stopped learner had, and finds the steps it had taken.

A log may hold many times what fits into memory, and the steps are taken again one after the other:
a `LoggedStep` says where its trajectories are, and `read` reads them when it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from vcpo.wire.trajectory import Trajectory, trajectory_from_message
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.ledger.changes import Change
from vcpo_learner.ledger.contents import LedgerContents
from vcpo_learner.ledger.lease import Lease

ReadChanges = Callable[[Sequence[int]], Iterable[Change]]
"""Reads the changes at some positions of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step as the log has it: what it was computed from."""

    policy_version: int
    """Version of the parameters before the step."""
    groups: tuple[Lease, ...]
    fresh: tuple[Trajectory, ...] = ()
    """Trajectories beside the batch that calibrated it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTrajectory:
    """A trajectory that is in the log only."""

    trajectory_id: str
    position: int
    """Position of the change that brought it."""
    worker_id: str | None
    """The worker that its lease names; the change does not name one."""


Member = Trajectory | LoggedTrajectory
"""A trajectory of a step: of the checkpoint, which is in memory, or of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step as a redo has found it, without the trajectories that the log has."""

    policy_version: int
    """Version of the parameters before the step."""
    groups: tuple[Lease, ...]
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
        logged = {
            each.trajectory_id: each
            for each in (*chain.from_iterable(self.members), *self.fresh)
            if isinstance(each, LoggedTrajectory)
        }
        found: dict[str, Trajectory] = {}
        for change in read_changes(sorted({each.position for each in logged.values()})):
            if isinstance(change, work_pb2.SubmitRequest):
                for message in change.trajectories:
                    if (one := logged.get(message.trajectory_id)) is not None:
                        trajectory = trajectory_from_message(message, path="trajectories[]")
                        found[one.trajectory_id] = replace(trajectory, worker_id=one.worker_id)

        def whole(members: Iterable[Member]) -> tuple[Trajectory, ...]:
            return tuple(
                found[each.trajectory_id] if isinstance(each, LoggedTrajectory) else each
                for each in members
            )

        return RecordedStep(
            policy_version=self.policy_version,
            groups=tuple(
                replace(group, accepted={each.number: each for each in whole(members)})
                for group, members in zip(self.groups, self.members, strict=True)
            ),
            fresh=whole(self.fresh),
        )


class Redo:
    """Replays changes over the contents of a checkpoint. Owner: the learner's event loop."""

    def __init__(self, contents: LedgerContents, read_changes: ReadChanges) -> None:
        """Begin with the contents of a checkpoint; read_changes: reads the log once more."""
        self.steps: dict[int, LoggedStep] = {}
        """Steps that were taken and not rolled back, by the version before."""
        self.versions: dict[int, ledger_pb2.VersionPublished] = {}
        """Versions that were announced; the last one if a version was announced twice."""
        self._contents = contents
        self._read_changes = read_changes
        self._members: dict[str, Member] = {
            each.trajectory_id: each
            for each in chain.from_iterable(contents.waiting_trajectories())
        }
        """Trajectories that the ledger holds, and those since the last step, by id. Dropped ones
        too: they may have calibrated the next step."""

    def apply(self, change: Change, position: int) -> None:
        """Replay the change at a position of the log.

        Raises:
            InconsistentChangeError: if it does not fit the ledger; the ledger stays as it is.
        """
        match change:
            case work_pb2.SubmitRequest():
                lease = self._contents.leases.get(change.lease_id)
                self._contents.replay(change)
                assert lease is not None  # or the change did not fit
                for each in lease.arrived:  # of one that was sent twice the first counts
                    logged = LoggedTrajectory(
                        trajectory_id=each.trajectory_id,
                        position=position,
                        worker_id=each.worker_id,
                    )
                    self._members.setdefault(each.trajectory_id, logged)
            case ledger_pb2.BatchConsumed():
                self._take_step(change, self._contents.replay(change))
            case ledger_pb2.VersionPublished():
                self.versions[change.policy_version] = change
            case ledger_pb2.RolledBack():
                self._roll_back(change)
            case _:
                self._contents.replay(change)

    def _take_step(self, change: ledger_pb2.BatchConsumed, groups: Sequence[Lease]) -> None:
        fresh = (self._members.get(each) for each in change.fresh_trajectory_ids)
        self.steps[change.policy_version] = LoggedStep(
            policy_version=change.policy_version,
            groups=tuple(replace(group, accepted={}) for group in groups),
            members=tuple(
                tuple(self._members[each.trajectory_id] for each in group.trajectories)
                for group in groups
            ),
            fresh=tuple(each for each in fresh if each is not None),
        )
        held = chain.from_iterable(self._contents.waiting_trajectories())
        self._members = {each.trajectory_id: self._members[each.trajectory_id] for each in held}

    def _roll_back(self, change: ledger_pb2.RolledBack) -> None:
        versions = [version for version in sorted(self.steps) if version >= change.policy_version]
        undone = [self.steps.pop(version) for version in versions]
        returned = undone if change.returns_groups else []
        read = [step.read(self._read_changes) for step in returned]
        self._contents.replay(change, [group for step in read for group in step.groups])
        for step in returned:
            self._members |= {
                each.trajectory_id: each for each in chain.from_iterable(step.members)
            }
        self.versions = {
            version: published
            for version, published in self.versions.items()
            if version <= change.policy_version
        }
