"""Steps that fail with an exception: which groups cause it, and when the settings do.

```
the update raises   are the parameters unchanged?   no -> the learner ends and restarts from a
                                                          checkpoint
                    try each group alone            some fail  -> exclude them
                                                    none fails -> exclude all
                                                    out of memory, and none or all fail
                                                               -> the settings are wrong
```

With replay a step also uses responses of earlier groups. They are tried and excluded as groups are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch

from vcpo.service.lifecycle import StartError
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.training.quarantine import Quarantine
from vcpo_learner.update.pending_step import PendingStep
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.result import UpdateResult

_BROKEN_IN_ROW = 3
"""So many failed batches in a row are caused by the run, not by the groups."""


class BrokenBatchError(Exception):
    """No step can be taken on a batch; parameters and optimizer are unchanged.

    reasons: the error of each group to exclude, by lease; with replay, also of earlier groups whose
        responses the step used.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(f"the update fails on {len(reasons)} groups")


class StepGuard:
    """Takes steps, and finds the groups that make one fail. Owner: the tensor thread."""

    def __init__(self, update: PolicyUpdate, quarantine: Quarantine) -> None:
        self._update = update
        self._quarantine = quarantine
        self._broken_in_row = 0
        self._groups: Sequence[Lease] = ()
        self._policy_version = 0
        self._trajectories: Mapping[str, tuple[Trajectory, ...]] = {}
        """Those of the step in hand, by lease."""

    def begin(self, groups: Sequence[Lease], *, policy_version: int) -> PendingStep:
        """Compute the gradient of a batch; call `finish` next.

        Raises:
            BrokenBatchError: naming the groups to exclude.
            StartError: if the settings cause the error, saying what to change.
            Exception: the update's own error, if parameters or device cannot be used any more.
        """
        batch = self._update.draw([group.trajectories for group in groups])
        self._groups, self._policy_version = groups, policy_version
        self._trajectories = _trajectories_by_lease(groups, chain.from_iterable(batch))
        self._quarantine.begin_step(self._trajectories)
        try:
            return self._update.begin(batch, policy_version=policy_version)
        except Exception as error:  # a model's own code may raise anything
            raise self._diagnose(error) from error

    def finish(self, newest: Sequence[Trajectory]) -> UpdateResult:
        """Take the step whose gradient `begin` computed.

        newest: trajectories beside the batch, for calibration. If the step fails with them, it is
            taken without them; a group that causes errors is found when it is trained on.

        Raises: as `begin`.
        """
        try:
            result = self._update.finish(newest)
        except Exception as error:  # as above
            if newest and self._update.is_whole:
                return self.finish(())
            raise self._diagnose(error) from error
        self._quarantine.end_step(self._trajectories)
        self._broken_in_row = 0
        return result

    def _diagnose(self, error: Exception) -> Exception:
        """Return the exception to raise for an error of the update."""
        if not self._update.is_whole:
            return error
        alone = self._errors_alone()
        # Only now, because a group that is tried alone may kill the process too.
        self._quarantine.end_step(self._trajectories)
        # Replayed responses may be so few that they fit into memory where no group does.
        every_group = all(group.lease_id in alone for group in self._groups)
        is_out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if is_out_of_memory and (every_group or not alone):
            return StartError(
                f"the update ran out of memory ({_error_text(error)}); lower"
                " spec.batch.tokensPerMicroBatch, spec.batch.microBatchTrajectories or"
                " spec.sampling.maxNewTokens"
            )
        self._broken_in_row += 1
        if self._broken_in_row >= _BROKEN_IN_ROW:
            return StartError(
                f"the update failed on {self._broken_in_row} batches in a row, on the last one with"
                f" {_error_text(error)}; the groups of the {self._broken_in_row - 1} batches before"
                " are in the quarantine folder of the run directory"
            )
        return BrokenBatchError(
            alone or dict.fromkeys(self._trajectories, f"{_error_text(error)}, in a batch")
        )

    def _errors_alone(self) -> dict[str, str]:
        """Try each group alone; return the errors of those that fail, by lease."""
        errors = {}
        for lease_id, group in self._trajectories.items():
            try:
                self._update.rehearse(group, policy_version=self._policy_version)
            except Exception as error:  # noqa: BLE001 - as above
                errors[lease_id] = _error_text(error)
        return errors


def _trajectories_by_lease(
    groups: Sequence[Lease], trained_on: Iterable[Trajectory]
) -> dict[str, tuple[Trajectory, ...]]:
    """Return the trajectories of the new groups, and those that the step uses from the replay."""
    arrived = {group.lease_id: group.trajectories for group in groups}
    replayed: dict[str, tuple[Trajectory, ...]] = {}
    for each in trained_on:
        if each.lease_id not in arrived:
            replayed[each.lease_id] = (*replayed.get(each.lease_id, ()), each)
    return arrived | replayed


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
