"""Checkpoints: everything a learner needs to go on, written so that half of one is never read.

```
checkpoints/step-00000050/   model.safetensors   parameters
                             update.pt           optimizer moments, calibration
                             ledger.pb           buffered trajectories, prompts owed, counts
                             meta.json           step, digests of the run's spec and the ledger
```

A checkpoint is written into a temporary folder, synced and renamed; what is found under its name is
complete. Consumption becomes final with the checkpoint that contains it: a restart goes back to the
newest one, and what was trained on since is trained on again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vcpo.lifecycle import StartError
from vcpo.spec import VCPORun, continuation_digest
from vcpo.wire.v1 import ledger_pb2

_PREFIX = "step-"
_FORMAT = 1
_UNREADABLE = (
    DecodeError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What the readers of the four files raise for a file that is damaged or absent."""
_Content = TypeVar("_Content")


class CheckpointError(StartError):
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
        self._digest = continuation_digest(run)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove the oldest ones beyond `keep`."""
        target = self._folder / f"{_PREFIX}{checkpoint.step:08d}"
        partial = self._folder / f".{target.name}.partial"
        for abandoned in self._folder.glob(f".{_PREFIX}*.partial"):
            shutil.rmtree(abandoned)
        partial.mkdir(parents=True)
        save_file(checkpoint.parameters, partial / "model.safetensors")
        torch.save(checkpoint.update_state, partial / "update.pt")
        ledger = checkpoint.ledger.SerializeToString()
        (partial / "ledger.pb").write_bytes(ledger)
        meta = _Meta(
            format=_FORMAT,
            step=checkpoint.step,
            spec_sha256=self._digest,
            ledger_sha256=hashlib.sha256(ledger).hexdigest(),
        )
        (partial / "meta.json").write_text(json.dumps(asdict(meta)) + "\n")
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        # The new name must be on the disk before the old checkpoints go.
        _sync(self._folder)
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
        meta = _read(path / "meta.json", _read_meta)
        if meta.format != _FORMAT:
            raise CheckpointError(
                f"{path}: has format {meta.format}, this version reads {_FORMAT}; resume with the"
                " version that wrote it"
            )
        if meta.spec_sha256 != self._digest:
            raise CheckpointError(
                f"{path}: belongs to a run with another model, environment, batch or optimizer;"
                " resume with the spec in its run directory, or start a new run"
            )
        return Checkpoint(
            step=meta.step,
            parameters=_read(path / "model.safetensors", load_file),
            update_state=_read(path / "update.pt", _read_update_state),
            ledger=_read(path / "ledger.pb", lambda file: _read_ledger(file, meta.ledger_sha256)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meta:
    format: int
    step: int
    spec_sha256: str
    ledger_sha256: str


def _read(file: Path, reader: Callable[[Path], _Content]) -> _Content:
    try:
        return reader(file)
    except _UNREADABLE as error:
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{file}: cannot be read ({cause:.200}); remove {file.parent} to resume from the"
            " checkpoint before"
        ) from error


def _read_meta(file: Path) -> _Meta:
    document = json.loads(file.read_text(encoding="utf-8"))
    return _Meta(
        format=int(document["format"]),
        step=int(document["step"]),
        spec_sha256=str(document["spec_sha256"]),
        ledger_sha256=str(document["ledger_sha256"]),
    )


def _read_update_state(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def _read_ledger(file: Path, sha256: str) -> ledger_pb2.LedgerSnapshot:
    data = file.read_bytes()
    # Half of a message may well be a message: unlike the tensors' formats this one needs a sum.
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("its checksum differs from the one in meta.json")
    return ledger_pb2.LedgerSnapshot.FromString(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
