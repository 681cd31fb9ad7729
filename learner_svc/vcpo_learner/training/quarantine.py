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
from pathlib import Path

from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ledger.trajectory_ledger import TrajectoryLedger
from vcpo_learner.telemetry.run_records import RunRecords
from vcpo_learner.update.policy_update import PolicyUpdate

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
