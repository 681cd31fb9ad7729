"""Redoes changes: makes the ledger that a stopped learner had, and finds the steps it had taken."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from vcpo_learner.ledger.changes import (
    BatchConsumed,
    Change,
    Evaluated,
    GroupsDropped,
    InconsistentChangeError,
    LagLimitLeft,
    LearnerRestarted,
    LeaseEnded,
    LeaseGranted,
    RolledBack,
    TrajectoriesAccepted,
    VersionPublished,
)
from vcpo_learner.ledger.contents import LedgerContents
from vcpo_learner.redo_log.logged_step import LoggedStep, LoggedTrajectory, Member, ReadChanges


class Redo:
    """Applies changes to the contents of a checkpoint. Owner: the learner's event loop."""

    def __init__(self, contents: LedgerContents, read_changes: ReadChanges) -> None:
        """Begin with the contents of a checkpoint; read_changes: reads the log once more."""
        self.steps: dict[int, LoggedStep] = {}
        """Steps that were taken and not rolled back, by the version before."""
        self.versions: dict[int, VersionPublished] = {}
        """Versions that were announced; the last one if a version was announced twice."""
        self._contents = contents
        self._read_changes = read_changes
        self._members: dict[str, Member] = {
            each.trajectory_id: each for each in chain.from_iterable(contents.accepted())
        }
        """Trajectories that the ledger holds, and those since the last step, by id. Dropped ones
        too: they may have calibrated the next step."""

    def apply(self, change: Change, position: int) -> None:
        """Redo the change at a position of the log.

        Raises:
            InconsistentChangeError: if it does not fit the ledger; the ledger stays as it is.
        """
        contents = self._contents
        match change:
            case LeaseGranted():
                self._grant(change)
            case TrajectoriesAccepted():
                self._accept(change, position)
            case LeaseEnded():
                contents.end(change)
            case GroupsDropped():
                contents.drop(change)
            case BatchConsumed():
                self._take_step(change)
            case VersionPublished():
                self.versions[change.policy_version] = change
            case Evaluated() | LagLimitLeft():
                contents.note(change)
            case LearnerRestarted():
                contents.restart()
            case RolledBack():
                self._roll_back(change)

    def _grant(self, change: LeaseGranted) -> None:
        source = self._contents.source
        if not change.is_requeued:
            # The choice is known; the source must have made it to choose alike later.
            source.next_prompt(self._contents.book.prompts())
        self._contents.grant(change)

    def _accept(self, change: TrajectoriesAccepted, position: int) -> None:
        lease = self._contents.book.get(change.lease_id)
        if lease is None:
            raise InconsistentChangeError(f"{change.lease_id} is not open")
        try:
            self._contents.accept(change)
        except ValueError as error:
            raise InconsistentChangeError(str(error)) from error
        for each in change.trajectories:  # of one that was sent twice the first counts
            logged = LoggedTrajectory(
                trajectory_id=each.trajectory_id,
                position=position,
                worker_id=lease.arrived[each.trajectory_id].worker_id,
            )
            self._members.setdefault(each.trajectory_id, logged)

    def _take_step(self, change: BatchConsumed) -> None:
        groups = self._contents.consume(change)
        fresh = (self._members.get(each) for each in change.fresh_trajectory_ids)
        self.steps[change.policy_version] = LoggedStep(
            policy_version=change.policy_version,
            groups=tuple(replace(group, trajectories=()) for group in groups),
            members=tuple(
                tuple(self._members[each.trajectory_id] for each in group.trajectories)
                for group in groups
            ),
            fresh=tuple(each for each in fresh if each is not None),
        )
        held = chain.from_iterable(self._contents.accepted())
        self._members = {each.trajectory_id: self._members[each.trajectory_id] for each in held}

    def _roll_back(self, change: RolledBack) -> None:
        versions = [version for version in sorted(self.steps) if version >= change.policy_version]
        undone = [self.steps[version] for version in versions]
        returned = undone if change.returns_groups else []
        self._contents.roll_back(change, [step.read(self._read_changes) for step in returned])
        for version in versions:
            del self.steps[version]
        for step in returned:
            self._members |= {
                each.trajectory_id: each for each in chain.from_iterable(step.members)
            }
        self.versions = {
            version: published
            for version, published in self.versions.items()
            if version <= change.policy_version
        }
