"""Groups that ended an update: kept on disk for people, and never trained on again.

```
quarantine/train-1f6b0c2e-17.json   a group, with the reason and all of its numbers
           step.json                the groups of the step under way, and how often each died in one
```

A checkpoint holds groups that wait for their step, and answers kept for replay, so what kills the
learner would kill each of its successors. An exception names its group while the learner lives. A
death does not: hence a note of what is under way, taken away when the step is over. Whoever finds
one counts a death for each of its groups, and after the second they go, whether or not the
checkpoint still holds them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from vcpo.wire.trajectory import Trajectory

_NOTE = "step.json"
_DEATHS_ALLOWED = 1
"""A learner may be killed for reasons that lie outside; twice with the same groups is a pattern."""


class Quarantine:
    """The folder of one run. Owner: the training loop; `enter` and `leave`: its tensor thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._note = folder / _NOTE
        self._deaths = _deaths(self._note)

    def excluded_lease_ids(self) -> frozenset[str]:
        """Groups that are not trained on: those kept here, and those that died too often."""
        died = {one for one, count in self._deaths.items() if count > _DEATHS_ALLOWED}
        return self.kept_lease_ids() | died

    def kept_lease_ids(self) -> frozenset[str]:
        """Groups that are written down here."""
        files = self._folder.glob("*.json")
        return frozenset(path.stem for path in files if path.name != _NOTE)

    def deaths(self, lease_id: str) -> int:
        """How often the learner died in a step with a group, as far as is noted."""
        return self._deaths.get(lease_id, 0)

    def begin_step(self, lease_ids: Collection[str]) -> None:
        """Note that a step with these groups begins."""
        self._write_note(lease_ids)

    def end_step(self, lease_ids: Collection[str]) -> None:
        """Note that the step is over, whatever became of it: nobody died."""
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
        """Write a group down, or what replay kept of it.

        prompt_index: None where it is not known any longer.

        Raises:
            OSError: when it cannot be written.
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
        under_way = list(lease_ids)
        # A full disk costs the note, not the step.
        with contextlib.suppress(OSError):
            if under_way or self._deaths:
                self._folder.mkdir(parents=True, exist_ok=True)
                _replace(self._note, json.dumps({"under_way": under_way, "deaths": self._deaths}))
            else:
                self._note.unlink(missing_ok=True)


def _deaths(note: Path) -> dict[str, int]:
    """Deaths by group, the one that left this note under way included."""
    try:
        document = json.loads(note.read_text(encoding="utf-8"))
        deaths = {str(one): int(count) for one, count in document["deaths"].items()}
        under_way = [str(one) for one in document["under_way"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return deaths | {one: deaths.get(one, 0) + 1 for one in under_way}


def _document(head: dict[str, object], trajectories: list[dict[str, object]]) -> str:
    """JSON that people can read: a line for each field, and one for each trajectory."""
    fields = [f'  "{name}": {json.dumps(value)}' for name, value in head.items()]
    # Token ids that came over the wire are packed sequences.
    members = ",\n".join(f"    {json.dumps(one, default=list)}" for one in trajectories)
    return "{\n" + ",\n".join([*fields, f'  "trajectories": [\n{members}\n  ]']) + "\n}\n"


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
