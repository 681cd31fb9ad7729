"""Steps that break: which groups they break at, and when that is not the groups' fault.

```
the update breaks       parameters untouched?  no -> the learner ends, a successor goes back
                        each group by itself   breaks alone -> it goes
                                               none does    -> all of them go
                                               out of memory, and none or all do -> settings
```

With replay a step is taken on answers of earlier groups too: they are tried, and go, as groups do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch

from vcpo.service.lifecycle import StartError
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.groups import Group
from vcpo_learner.training.quarantine import Quarantine
from vcpo_learner.update.pending_step import PendingStep
from vcpo_learner.update.result import UpdateResult

_BROKEN_IN_ROW = 3
"""So many batches in a row that break are the run's fault, not the groups'."""

_Parts = Mapping[str, tuple[Trajectory, ...]]
"""What a step is taken on, by lease."""


class BrokenBatchError(Exception):
    """A batch on which no step can be taken; nothing was changed.

    reasons: what each group to be left out broke at, by its lease; with replay, also groups of
        earlier steps, whose kept answers this one was taken on.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(f"{len(reasons)} groups break the update")


class GuardedUpdate(Protocol):
    """What is asked of an update beside its step."""

    @property
    def is_whole(self) -> bool:
        """Whether parameters and optimizer belong together."""

    def drawn(self, groups: Sequence[Sequence[Trajectory]]) -> Sequence[Sequence[Trajectory]]:
        """What a step is taken on when these groups arrive."""

    def begin(self, groups: Sequence[Sequence[Trajectory]], *, policy_version: int) -> PendingStep:
        """Find the gradient of a batch."""

    def finish(self, pending: PendingStep, newest: Sequence[Trajectory] = ()) -> UpdateResult:
        """Decide the step and take it, or skip it and say why."""

    def rehearse(self, group: Sequence[Trajectory], *, policy_version: int) -> None:
        """Go the way to the gradient with one group, and leave everything as it was."""


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
        batch = self._update.drawn([group.trajectories for group in groups])
        parts = _parts(groups, chain.from_iterable(batch))
        self._quarantine.begin_step(parts)
        try:
            return self._update.begin(batch, policy_version=policy_version)
        except Exception as error:  # a model's own code runs there
            raise self._broken_batch(groups, parts, error, policy_version) from error

    def finish(
        self, groups: Sequence[Group], pending: PendingStep, newest: Sequence[Trajectory]
    ) -> UpdateResult:
        """Take the step that `begin` found the gradient of.

        newest: answers beside the batch, for calibration; when it breaks with them it is taken
            without. What breaks it is found when it is trained on.
        Raises: as `begin`.
        """
        parts = _parts(groups, pending.trajectories)
        try:
            result = self._update.finish(pending, newest)
        except Exception as error:  # as above
            if newest and self._update.is_whole:
                return self.finish(groups, pending, ())
            raise self._broken_batch(groups, parts, error, pending.policy_version) from error
        self._quarantine.end_step(parts)
        self._broken_in_row = 0
        return result

    def _broken_batch(
        self, groups: Sequence[Group], parts: _Parts, error: Exception, policy_version: int
    ) -> Exception:
        """What to raise for an error; the error itself when nothing may be used any longer."""
        if not self._update.is_whole:
            return error
        alone = self._broken_alone(parts, policy_version)
        # Not before: what is tried alone may end the process as well.
        self._quarantine.end_step(parts)
        # Of kept answers there may be so few that they fit where no group does.
        every_group = all(group.lease_id in alone for group in groups)
        if _is_out_of_memory(error) and (every_group or not alone):
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
        return BrokenBatchError(alone or dict.fromkeys(parts, f"{_told(error)}, in a batch"))

    def _broken_alone(self, parts: _Parts, policy_version: int) -> dict[str, str]:
        """What each part breaks at that breaks the update by itself, by its lease."""
        alone = {}
        for lease_id, trajectories in parts.items():
            try:
                self._update.rehearse(trajectories, policy_version=policy_version)
            except Exception as own:  # noqa: BLE001 - as above
                alone[lease_id] = _told(own)
        return alone


def _parts(
    groups: Sequence[Group], trained_on: Iterable[Trajectory]
) -> dict[str, tuple[Trajectory, ...]]:
    """Groups that arrived, and beside them what the step takes of answers that were kept."""
    arrived = {group.lease_id: group.trajectories for group in groups}
    kept: dict[str, tuple[Trajectory, ...]] = {}
    for each in trained_on:
        if each.lease_id not in arrived:
            kept[each.lease_id] = (*kept.get(each.lease_id, ()), each)
    return arrived | kept


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))
