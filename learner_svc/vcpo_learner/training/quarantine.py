"""The quarantine: groups that broke an update, taken out of the run and kept on disk.

```
quarantine/train-1f6b0c2e-17.json   a group, with the reason and all of its numbers
           step.json                the groups of the current step, and the deaths of each group
```

A checkpoint holds the groups that wait for their step and the responses kept for replay. So a group
that kills the learner would kill every restarted learner too. An exception names its group; a
killed process does not. Therefore the learner writes the groups of a step to `step.json` before the
step and removes them after it. A learner that finds groups in this file counts a death for each of
them. After two deaths a group is excluded, whether the checkpoint holds it or not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch

from vcpo.service.lifecycle import StartError
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.ledger import TrajectoryLedger
from vcpo_learner.telemetry.run_records import RunRecords
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.result import PendingStep, UpdateResult

_NOTE = "step.json"
_DEATHS_ALLOWED = 1
"""One death may have another cause; a second death with the same group is a pattern."""


class Quarantine:
    """The folder of one run. The tensor thread calls `begin_step` and `end_step`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._note = folder / _NOTE
        self._deaths = _deaths(self._note)

    def excluded_lease_ids(self) -> frozenset[str]:
        """Return the leases of groups that are not trained on: on disk, or with too many deaths."""
        died = {one for one, count in self._deaths.items() if count > _DEATHS_ALLOWED}
        return self.kept_lease_ids() | died

    def kept_lease_ids(self) -> frozenset[str]:
        """Return the leases of the groups on disk."""
        files = self._folder.glob("*.json")
        return frozenset(path.stem for path in files if path.name != _NOTE)

    def deaths(self, lease_id: str) -> int:
        """Return how often the learner died in a step with a group."""
        return self._deaths.get(lease_id, 0)

    def begin_step(self, lease_ids: Collection[str]) -> None:
        """Record that a step with these groups begins."""
        self._write_note(lease_ids)

    def end_step(self, lease_ids: Collection[str]) -> None:
        """Record that the step is over, taken or not, and that the learner did not die."""
        for lease_id in lease_ids:
            self._deaths.pop(lease_id, None)
        self._write_note(())

    def keep(
        self,
        lease_id: str,
        trajectories: Sequence[Trajectory],
        *,
        prompt_index: int | None,
        reason: str,
        step: int,
    ) -> Path:
        """Write a group to disk, or the part of it that replay kept; return the file.

        prompt_index: None if it is not known any more.

        Raises:
            OSError: if it cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{lease_id}.json"
        head: dict[str, object] = {
            "lease_id": lease_id,
            "prompt_index": prompt_index,
            "reason": reason,
            "step": step,
            "time_unix_s": time.time(),
        }
        _replace(path, _document(head, [asdict(one) for one in trajectories]))
        self._deaths.pop(lease_id, None)
        return path

    def _write_note(self, lease_ids: Iterable[str]) -> None:
        """Write `step.json`, or remove it if there is nothing to record."""
        under_way = list(lease_ids)
        # A full disk must not prevent the step.
        with contextlib.suppress(OSError):
            if under_way or self._deaths:
                self._folder.mkdir(parents=True, exist_ok=True)
                _replace(self._note, json.dumps({"under_way": under_way, "deaths": self._deaths}))
            else:
                self._note.unlink(missing_ok=True)


def _deaths(note: Path) -> dict[str, int]:
    """Read the deaths by group; groups that the file lists as under way have died once more."""
    try:
        document = json.loads(note.read_text(encoding="utf-8"))
        deaths = {str(one): int(count) for one, count in document["deaths"].items()}
        under_way = [str(one) for one in document["under_way"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return deaths | {one: deaths.get(one, 0) + 1 for one in under_way}


def _document(head: dict[str, object], trajectories: list[dict[str, object]]) -> str:
    """Return readable JSON: one line for each field and one for each trajectory."""
    fields = [f'  "{name}": {json.dumps(value)}' for name, value in head.items()]
    # Token ids that came over the wire are packed sequences.
    members = ",\n".join(f"    {json.dumps(one, default=list)}" for one in trajectories)
    return "{\n" + ",\n".join([*fields, f'  "trajectories": [\n{members}\n  ]']) + "\n}\n"


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


class Exclusion:
    """Excludes groups of one run. Owner: the event loop, while no step is under way."""

    def __init__(
        self,
        *,
        update: PolicyUpdate,
        ledger: TrajectoryLedger,
        records: RunRecords,
        quarantine: Quarantine,
    ) -> None:
        self._update = update
        self._ledger = ledger
        self._records = records
        self._quarantine = quarantine

    def exclude_again(self, step: int) -> None:
        """Exclude what was excluded before; an older state may hold it."""
        self.exclude(self._quarantine.excluded_lease_ids(), {}, step)

    def exclude(self, lease_ids: Collection[str], reasons: Mapping[str, str], step: int) -> None:
        """Remove groups that break the update from ledger and replay; write each to disk once.

        reasons: why each group is excluded, by lease; the learner died with the others.
        """
        kept = self._quarantine.kept_lease_ids()
        excluded = self._update.forget(lease_ids)
        prompts: dict[str, int] = {}
        for group in self._ledger.quarantine(lease_ids):
            excluded[group.lease_id] = group.trajectories
            prompts[group.lease_id] = group.prompt_index
        for lease_id, trajectories in excluded.items():
            if lease_id in kept:
                continue
            deaths = f"the learner died {self._quarantine.deaths(lease_id)} times in a step with it"
            reason = reasons.get(lease_id, deaths)
            prompt = prompts.get(lease_id)
            try:
                path = self._quarantine.keep(
                    lease_id, trajectories, prompt_index=prompt, reason=reason, step=step
                )
                where = f"stored in {path}"
            except OSError as error:
                where = f"it cannot be stored ({error.strerror})"
            what = "kept for replay" if prompt is None else f"prompt {prompt}"
            self._records.event(
                "GroupQuarantined",
                f"{lease_id} ({what}) is not trained on: {reason}; {where}",
            )


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
    """Takes steps, and finds the groups that make one fail. Owner: the tensor thread.

    ```
    the update raises   are the parameters unchanged?   no -> the learner ends and restarts from a
                                                              checkpoint
                        try each group alone            some fail  -> exclude them
                                                        none fails -> exclude all
                                                        out of memory, and none or all fail
                                                                   -> the settings are wrong
    ```

    With replay a step also uses responses of earlier groups. They are tried and excluded too.
    """

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
