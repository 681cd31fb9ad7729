"""Redoes changes: makes the ledger that a stopped learner had, and finds the steps it had taken."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from vcpo.wire.trajectory import Trajectory
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
from vcpo_learner.ledger.contents import LedgerContents, RecordedStep


class Redo:
    """Applies changes to the contents of a checkpoint. Owner: the learner's event loop."""

    def __init__(self, contents: LedgerContents) -> None:
        self.steps: dict[int, RecordedStep] = {}
        """Steps that were taken and not rolled back, by the version before."""
        self.versions: dict[int, VersionPublished] = {}
        """Versions that were announced; the last one if a version was announced twice."""
        self._contents = contents
        self._arrived = _by_id(chain.from_iterable(contents.accepted()))
        """Trajectories since the last step, dropped ones too: they may have calibrated the next."""

    def apply(self, change: Change) -> None:
        """Redo one change.

        Raises:
            InconsistentChangeError: if it does not fit the ledger; the ledger stays as it is.
        """
        contents = self._contents
        match change:
            case LeaseGranted():
                self._grant(change)
            case TrajectoriesAccepted():
                self._accept(change)
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

    def _accept(self, change: TrajectoriesAccepted) -> None:
        lease = self._contents.book.get(change.lease_id)
        if lease is None:
            raise InconsistentChangeError(f"{change.lease_id} is not open")
        try:
            self._contents.accept(change)
        except ValueError as error:
            raise InconsistentChangeError(str(error)) from error
        # As the lease has them, with their worker.
        self._arrived |= {
            each.trajectory_id: lease.arrived[each.trajectory_id] for each in change.trajectories
        }

    def _take_step(self, change: BatchConsumed) -> None:
        groups = self._contents.consume(change)
        fresh = (self._arrived.get(each) for each in change.fresh_trajectory_ids)
        self.steps[change.policy_version] = RecordedStep(
            policy_version=change.policy_version,
            groups=groups,
            fresh=tuple(each for each in fresh if each is not None),
        )
        self._arrived = {}

    def _roll_back(self, change: RolledBack) -> None:
        undone = [
            self.steps.pop(version)
            for version in sorted(self.steps)
            if version >= change.policy_version
        ]
        self._contents.roll_back(change, undone)
        self.versions = {
            version: published
            for version, published in self.versions.items()
            if version <= change.policy_version
        }


def _by_id(trajectories: Iterable[Trajectory]) -> dict[str, Trajectory]:
    return {each.trajectory_id: each for each in trajectories}
