"""Checkpoints: everything a learner needs to go on, whole and checked, or not used at all.

```
checkpoints/step-00000050/   model.safetensors   parameters
                             update.pt           optimizer moments, calibration
                             ledger.pb           buffered trajectories, prompts owed, counts
                             meta.json           step, what a resume must share, a sum per file
            damaged-step-00000100/   what was found damaged, until that step is saved again
```

A checkpoint is written into a temporary folder, synced and renamed, and read only when every file
has its sum; one that is damaged gives way to the one before. Consumption becomes final with the
checkpoint that contains it: a restart goes back to the newest one that is whole, and what was
trained on since is trained on again.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load_file

from vcpo.service.lifecycle import StartError
from vcpo.spec import VCPORun, continuation_changes, continuation_document
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.model.checkpoint_manifest import (
    DamageError,
    FormatError,
    Manifest,
    file_sums,
    read_manifest,
)
from vcpo_learner.model.disk import atomic_folder, nested_bytes, write_state, write_tensors

_NAME = re.compile(r"step-(\d+)")
_DAMAGED = "damaged-"
_PARAMETERS, _UPDATE, _LEDGER = "model.safetensors", "update.pt", "ledger.pb"
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
"""What the readers of the files raise for one that they cannot make sense of."""


class CheckpointError(StartError):
    """A checkpoint that cannot be used; says what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not what was written; an older one may be."""

    def __init__(self, path: Path, cause: object) -> None:
        self.path = path
        super().__init__(str(cause))


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
        self._spec = continuation_document(run)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove the oldest ones beyond `keep`.

        Raises:
            DiskFullError: when there is no room for it; those that there are stay.
        """
        target = self._folder / _name(checkpoint.step)
        ledger = checkpoint.ledger.SerializeToString()
        for abandoned in self._folder.glob(".step-*.partial"):
            shutil.rmtree(abandoned)
        with atomic_folder(
            target,
            what=f"the checkpoint of step {checkpoint.step}",
            needed_bytes=nested_bytes([checkpoint.parameters, checkpoint.update_state])
            + len(ledger),
        ) as partial:
            write_tensors(checkpoint.parameters, partial / _PARAMETERS)
            write_state(checkpoint.update_state, partial / _UPDATE)
            (partial / _LEDGER).write_bytes(ledger)
            Manifest(
                step=checkpoint.step,
                spec=self._spec,
                files=file_sums(partial, (_PARAMETERS, _UPDATE, _LEDGER)),
            ).write(partial)
        self._remove_old(checkpoint.step)
        return target

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint by its name, whole or not, in their order."""
        return sorted(self._paths())

    def load_newest(self) -> tuple[Checkpoint | None, tuple[DamagedCheckpointError, ...]]:
        """Read the newest checkpoint that is whole; also says what is wrong with newer ones.

        Returns None when there is no checkpoint.

        Raises:
            CheckpointError: when it belongs to another spec or version, or none is whole.
        """
        damaged: list[DamagedCheckpointError] = []
        for step in reversed(self.steps()):
            try:
                return self.load(step), tuple(damaged)
            except DamagedCheckpointError as error:
                damaged.append(error)
        if damaged:
            causes = "; ".join(map(str, damaged))
            raise CheckpointError(
                f"{self._folder}: no checkpoint is whole: {causes}; put one back from a copy, or"
                " remove the folder to begin anew"
            )
        return None, ()

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of a step.

        Raises:
            DamagedCheckpointError: when it is not what was written.
            CheckpointError: when there is none, or it belongs to another spec or version.
        """
        path = self._paths().get(step)
        if path is None:
            there_are = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self._folder}: holds no checkpoint of step {step}; it has {there_are}"
            )
        try:
            return self._read(path, step)
        except DamageError as error:
            raise DamagedCheckpointError(path, error) from error
        except FormatError as error:
            raise CheckpointError(
                f"{error}; resume with the version that wrote it, or begin anew in another"
                " --run-dir"
            ) from error

    def set_aside(self, damaged: Iterable[DamagedCheckpointError]) -> None:
        """Rename damaged checkpoints, so that they are neither tried again nor counted."""
        for one in damaged:
            aside = one.path.with_name(_DAMAGED + one.path.name)
            shutil.rmtree(aside, ignore_errors=True)
            one.path.rename(aside)

    def _read(self, path: Path, step: int) -> Checkpoint:
        manifest = read_manifest(path)
        if manifest.step != step:
            raise DamageError(f"{path}: holds step {manifest.step}, not the one in its name")
        if changes := ", ".join(continuation_changes(manifest.spec, self._spec)):
            raise CheckpointError(
                f"{path}: belongs to a run with another spec ({changes}); set it back to resume, or"
                " start a new run"
            )
        manifest.check_files(path)
        try:
            return Checkpoint(
                step=step,
                parameters=load_file(path / _PARAMETERS),
                update_state=torch.load(path / _UPDATE, weights_only=True),
                ledger=ledger_pb2.LedgerSnapshot.FromString((path / _LEDGER).read_bytes()),
            )
        except _UNREADABLE as error:
            cause = f"{type(error).__name__}: {error}"
            raise DamageError(f"{path}: cannot be read ({cause:.200})") from error

    def _paths(self, prefix: str = "") -> dict[int, Path]:
        """Folders with exactly the name of a checkpoint behind `prefix`, by step."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                number = _NAME.fullmatch(path.name.removeprefix(prefix))
                if number is None or not path.is_dir():
                    continue
                if path.name == prefix + _name(step := int(number[1])):
                    found[step] = path
        return found

    def _remove_old(self, saved_step: int) -> None:
        """Remove all but the newest `keep` up to the one saved, and what was damaged before it."""
        kept = [step for step in self.steps() if step <= saved_step][-self._keep :]
        removed = [path for step, path in self._paths().items() if step < kept[0]]
        removed += [path for step, path in self._paths(_DAMAGED).items() if step <= saved_step]
        for path in removed:
            shutil.rmtree(path, ignore_errors=True)


def _name(step: int) -> str:
    """What the folder of a step's checkpoint is called; any other spelling is another folder."""
    return f"step-{step:08d}"
