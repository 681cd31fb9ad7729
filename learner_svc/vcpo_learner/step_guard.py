"""Steps that break: which groups they break at, and when that is not the groups' fault.

```
the update breaks       parameters untouched?  no -> the learner ends, a successor goes back
                        each group by itself   breaks alone -> it goes
                                               none does    -> all of them go
                                               out of memory, and none or all do -> settings
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from vcpo.lifecycle import StartError
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.groups import Group
from vcpo_learner.pending_step import PendingStep
from vcpo_learner.quarantine import Quarantine
from vcpo_learner.update_result import UpdateResult

_BROKEN_IN_ROW = 3
"""So many batches in a row that break are the run's fault, not the groups'."""


class BrokenBatchError(Exception):
    """A batch on which no step can be taken; nothing was changed.

    reasons: what each group to be left out broke at, by its lease.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(f"{len(reasons)} groups break the update")


class GuardedUpdate(Protocol):
    """What is asked of an update beside its step."""

    @property
    def is_whole(self) -> bool:
        """Whether parameters and optimizer belong together."""

    def begin(self, groups: Sequence[Sequence[Trajectory]], *, policy_version: int) -> PendingStep:
        """Find the gradient of a batch."""

    def finish(self, pending: PendingStep, newest: Sequence[Trajectory] = ()) -> UpdateResult:
        """Decide the step and take it, or skip it and say why."""

    def rehearse(self, group: Sequence[Trajectory], *, policy_version: int) -> None:
        """Go the way to the gradient with one group, and leave everything as it was."""

    def forget(self, group: Sequence[Trajectory]) -> None:
        """Keep nothing of a group for later steps."""


class StepGuard:
    """Takes steps, and finds out why one broke. Owner: the tensor thread."""

    def __init__(self, update: GuardedUpdate, quarantine: Quarantine) -> None:
        self._update = update
        self._quarantine = quarantine
        self._broken_in_row = 0

    def begin(self, groups: Sequence[Group], *, policy_version: int) -> PendingStep:
        """Find the gradient of a batch; `finish` is to follow.

        Raises:
            BrokenBatchError: naming the groups to be left out.
            StartError: when it is not the groups that break it; says what to change.
            Exception: what the update raised, when parameters or device are no longer to be used.
        """
        self._quarantine.enter([group.lease_id for group in groups])
        try:
            batch = [group.trajectories for group in groups]
            return self._update.begin(batch, policy_version=policy_version)
        except Exception as error:  # a model's own code runs there
            raise self._broken_batch(groups, error, policy_version) from error

    def finish(
        self, groups: Sequence[Group], pending: PendingStep, newest: Sequence[Trajectory]
    ) -> UpdateResult:
        """Take the step that `begin` found the gradient of.

        newest: answers beside the batch, for calibration; when it breaks with them it is taken
            without. What breaks it is found when it is trained on.
        Raises: as `begin`.
        """
        try:
            result = self._update.finish(pending, newest)
        except Exception as error:  # as above
            if newest and self._update.is_whole:
                return self.finish(groups, pending, ())
            raise self._broken_batch(groups, error, pending.policy_version) from error
        self._quarantine.leave([group.lease_id for group in groups])
        self._broken_in_row = 0
        return result

    def _broken_batch(
        self, groups: Sequence[Group], error: Exception, policy_version: int
    ) -> Exception:
        """What to raise for an error; the error itself when nothing may be used any longer."""
        if not self._update.is_whole:
            return error
        alone = self._broken_alone(groups, policy_version)
        # Not before: what is tried alone may end the process as well.
        self._quarantine.leave([group.lease_id for group in groups])
        if _is_out_of_memory(error) and len(alone) in (0, len(groups)):
            return StartError(
                f"the update ran out of memory ({_told(error)}); lower"
                " spec.batch.microBatchTrajectories or spec.sampling.maxNewTokens"
            )
        self._broken_in_row += 1
        if self._broken_in_row >= _BROKEN_IN_ROW:
            return StartError(
                f"{self._broken_in_row} batches in a row broke the update, the last one with"
                f" {_told(error)}; groups of the {self._broken_in_row - 1} before are in the"
                " quarantine folder of the run directory"
            )
        reasons = alone or dict.fromkeys(
            (group.lease_id for group in groups), f"{_told(error)}, in a batch"
        )
        for group in groups:
            if group.lease_id in reasons:
                self._update.forget(group.trajectories)
        return BrokenBatchError(reasons)

    def _broken_alone(self, groups: Sequence[Group], policy_version: int) -> dict[str, str]:
        """What each group breaks at that breaks the update by itself, by its lease."""
        alone = {}
        for group in groups:
            try:
                self._update.rehearse(group.trajectories, policy_version=policy_version)
            except Exception as own:  # noqa: BLE001 - as above
                alone[group.lease_id] = _told(own)
        return alone


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))
