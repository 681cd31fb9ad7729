"""Checkpoints: everything a learner needs to go on, written so that half of one is never read.

```
checkpoints/step-00000050/   model.safetensors   parameters
                             update.pt           optimizer moments, calibration
                             ledger.pb           buffered trajectories, prompts owed, counts
                             meta.json           step and digest of the run's spec
```

A checkpoint is written into a temporary folder, synced and renamed; what is found under its name is
complete. Consumption becomes final with the checkpoint that contains it: a restart goes back to the
newest one, and what was trained on since is trained on again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vcpo.spec import VCPORun
from vcpo.wire.v1 import ledger_pb2

_PREFIX = "step-"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A learner's state after `step` steps."""

    step: int
    parameters: dict[str, torch.Tensor]
    update_state: dict[str, Any]
    """Of `PolicyUpdate.state_dict`."""
    ledger: ledger_pb2.LedgerSnapshot


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, run: VCPORun) -> None:
        self._folder = folder
        self._keep = run.spec.checkpoint.keep
        self._digest = spec_digest(run)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove the oldest ones beyond `keep`."""
        target = self._folder / f"{_PREFIX}{checkpoint.step:08d}"
        partial = self._folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(checkpoint.parameters, partial / "model.safetensors")
        torch.save(checkpoint.update_state, partial / "update.pt")
        (partial / "ledger.pb").write_bytes(checkpoint.ledger.SerializeToString())
        meta = {"format": _FORMAT, "step": checkpoint.step, "spec_sha256": self._digest}
        (partial / "meta.json").write_text(json.dumps(meta) + "\n")
        _sync(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self._folder.glob(f"{_PREFIX}*"))

    def load_newest(self) -> Checkpoint | None:
        """Read the newest checkpoint; None when there is none.

        Raises:
            CheckpointError: when it belongs to another spec or cannot be read.
        """
        checkpoints = self.all()
        return self._load(checkpoints[-1]) if checkpoints else None

    def _load(self, path: Path) -> Checkpoint:
        try:
            meta = json.loads((path / "meta.json").read_text())
            if meta["spec_sha256"] != self._digest:
                raise CheckpointError(
                    f"{path}: belongs to a run with another model, environment, batch or optimizer;"
                    " resume with the spec in its run directory, or start a new run"
                )
            ledger = ledger_pb2.LedgerSnapshot.FromString((path / "ledger.pb").read_bytes())
            return Checkpoint(
                step=int(meta["step"]),
                parameters=load_file(path / "model.safetensors"),
                update_state=torch.load(path / "update.pt", weights_only=True),
                ledger=ledger,
            )
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); remove it to resume from the one before"
            ) from error


def spec_digest(run: VCPORun) -> str:
    """Digest of what must stay the same between a checkpoint and its continuation."""
    kept = {"model", "environment", "batch", "optimizer"}
    document = run.spec.model_dump(mode="json", by_alias=True, include=kept)
    # How the batch is cut for memory does not change the update.
    document["batch"].pop("microBatchTrajectories", None)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
