"""The checkpoints of a run: everything that a learner needs to resume it.

```
checkpoints/step-00000050/   tensors/           parameters and moments, a file for each rank
                             ledger-00000.pb    open leases and counts; buffered trajectories,
                             ledger-00001.pb    in as many files as they need
                             update.pt          calibration, warning, replay, random generators
                             meta.json          step, spec that a resume must share, checksums
            damaged-step-00000100/   a damaged checkpoint, until that step is saved again
```

The learner writes a checkpoint into a temporary folder, syncs it and renames it. It reads a
checkpoint only if every file has its checksum; if one is damaged it reads the checkpoint before.
Consumption becomes final with the checkpoint that contains it: a restarted learner resumes from the
newest intact checkpoint and takes the steps after it again, from the redo log.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from google.protobuf.message import DecodeError

from vcpo.api import VCPORun, continuation_changes, continuation_document
from vcpo.service.lifecycle import StartError
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.checkpoints.disk import atomic_folder, kept_steps
from vcpo_learner.checkpoints.manifest import (
    CheckpointManifest,
    DamageError,
    FileChecksum,
    FormatError,
    file_checksums,
    read_manifest,
)
from vcpo_learner.checkpoints.tensor_index import read_index

TENSORS: Final = "tensors"
"""Name of the folder with parameters and moments in a checkpoint."""

_NAME = re.compile(r"step-(\d+)")
_DAMAGED = "damaged-"
_UPDATE, _LEDGER = "update.pt", "ledger-{:05d}.pb"
_UNREADABLE = (
    DecodeError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""Errors of the libraries that read the files, for a file that they cannot read."""


class CheckpointError(StartError):
    """A checkpoint cannot be used; the message says what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint differs from what was written; an older one may be intact."""

    def __init__(self, path: Path, cause: object) -> None:
        self.path = path
        super().__init__(str(cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a learner after `step` steps, as read; its tensors are still in files."""

    step: int
    tensors: Path
    """Folder of `TensorFiles`."""
    update_state: dict[str, Any]
    """State of the update, as `PolicyUpdate.state_dict` returned it."""
    ledger: tuple[ledger_pb2.LedgerSnapshot, ...]
    """The parts of a ledger, `LedgerState.parts`."""


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, run: VCPORun) -> None:
        self._folder = folder
        self._keep = run.spec.checkpoint.keep
        self._good_age_steps = run.spec.rollback_age_steps
        self._may_roll_back = run.spec.health.guards.rolls_back
        self._spec = continuation_document(run)

    @contextlib.contextmanager
    def writing(self, step: int, *, needed_bytes: int) -> Iterator[Path]:
        """Yield a folder that becomes a checkpoint after the block; `complete` fills it.

        needed_bytes: about how much is written, for the error.

        Raises:
            DiskFullError: if the disk has no room for it; the other checkpoints stay.
        """
        for abandoned in self._folder.glob(".step-*.partial"):
            shutil.rmtree(abandoned)
        with atomic_folder(
            self._folder / _folder_name(step),
            what=f"the checkpoint of step {step}",
            needed_bytes=needed_bytes,
        ) as partial:
            yield partial

    def complete(
        self,
        partial: Path,
        *,
        step: int,
        tensors: Mapping[str, FileChecksum],
        update_state: bytes,
        ledger: Iterable[ledger_pb2.LedgerSnapshot],
        healthy: bool = True,
    ) -> None:
        """Write what is not in `TENSORS` of a folder of `writing`, and the manifest.

        tensors: checksums of the files in `TENSORS`, by name.
        update_state: `state_bytes` of `PolicyUpdate.state_dict`.
        ledger: the parts of the ledger at the same moment, `LedgerState.parts`.
        healthy: whether the run was well at that moment.
        """
        names = [_UPDATE]
        (partial / _UPDATE).write_bytes(update_state)
        for number, part in enumerate(ledger):
            names.append(_LEDGER.format(number))
            (partial / names[-1]).write_bytes(part.SerializeToString())
        files = {f"{TENSORS}/{name}": checksum for name, checksum in tensors.items()}
        files |= file_checksums(partial, names)
        manifest = CheckpointManifest(step=step, spec=self._spec, files=files, healthy=healthy)
        manifest.write(partial)

    def remove_old(self, saved_step: int, best: int | None = None) -> set[int]:
        """Keep what `kept_steps` says of the checkpoints up to a step; remove the damaged ones.

        best: step of a checkpoint that stays, however old it is.

        Returns the steps of `kept_steps`: from these a learner may resume.
        """
        steps = [step for step in self.steps() if step <= saved_step]
        good = self.healthy_steps() if self._may_roll_back else []
        kept = kept_steps(steps, keep=self._keep, good=good, good_age_steps=self._good_age_steps)
        removed = [
            path
            for step, path in checkpoint_paths(self._folder).items()
            if step <= saved_step and step not in kept and step != best
        ]
        removed += [
            path
            for step, path in checkpoint_paths(self._folder, _DAMAGED).items()
            if step <= saved_step
        ]
        for path in removed:
            _remove(path)
        return kept

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, intact or not, in ascending order."""
        return sorted(checkpoint_paths(self._folder))

    def healthy_steps(self) -> list[int]:
        """Return the steps of the checkpoints at which the run was well, in ascending order."""
        found = []
        for step, path in sorted(checkpoint_paths(self._folder).items()):
            with contextlib.suppress(DamageError, FormatError):
                if read_manifest(path).healthy:
                    found.append(step)
        return found

    def load_newest(self) -> tuple[Checkpoint | None, tuple[DamagedCheckpointError, ...]]:
        """Read the newest intact checkpoint; also return the errors of newer, damaged ones.

        Returns None as the checkpoint if there is none.

        Raises:
            CheckpointError: if the checkpoint has another spec or format, or none is intact.
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
                f"{self._folder}: no checkpoint is intact: {causes}; restore one from a copy, or"
                " remove the folder to start the run again"
            )
        return None, ()

    def find_misnamed(self) -> dict[Path, str]:
        """Return what is named almost as a checkpoint, and how it must be named to be one."""
        named = {path: _folder_name(step) for path, step in _find_by_number(self._folder).items()}
        return {path: name for path, name in named.items() if path.name != name}

    def tensors(self, step: int) -> Path:
        """Return the folder with the tensors of a checkpoint."""
        return self._folder / _folder_name(step) / TENSORS

    def saved_unix_s(self, step: int) -> float:
        """Return when the checkpoint of a step was written, by its folder; seconds since 1970."""
        return (self._folder / _folder_name(step)).stat().st_mtime

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of a step.

        Raises:
            DamagedCheckpointError: if it differs from what was written.
            CheckpointError: if there is none, or it has another spec or format.
        """
        path = checkpoint_path(self._folder, step)
        manifest = _manifest(path, step)
        require_same_spec(path, manifest.spec, self._spec)
        return _read(path, manifest)

    def set_aside(self, damaged: Iterable[DamagedCheckpointError]) -> None:
        """Rename damaged checkpoints, so that they are not tried or counted again."""
        for one in damaged:
            aside = one.path.with_name(_DAMAGED + one.path.name)
            _remove(aside)
            one.path.rename(aside)


def _remove(path: Path) -> None:
    """Remove a folder, or what has the name of one; what cannot be removed stays."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def require_same_spec(path: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Check that a file of a run may be resumed under a spec; both are continuation documents.

    Raises:
        CheckpointError: naming the fields that differ.
    """
    if changes := ", ".join(continuation_changes(before, after)):
        raise CheckpointError(
            f"{path}: belongs to a run with another spec ({changes}); change it back to resume,"
            " or start a new run"
        )


def checkpoint_paths(folder: Path, prefix: str = "") -> dict[int, Path]:
    """Return what has `prefix` and the name of a checkpoint, by step, usable or not.

    Raises:
        CheckpointError: if the folder is there and cannot be listed.
    """
    numbered = _find_by_number(folder, prefix)
    return {
        step: path for path, step in numbered.items() if path.name == prefix + _folder_name(step)
    }


def _find_by_number(folder: Path, prefix: str = "") -> dict[Path, int]:
    """Return what has `prefix`, `step-` and digits for a name, with its number.

    Raises:
        CheckpointError: if the folder is there and cannot be listed.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        if not os.path.lexists(folder):
            return {}
        raise CheckpointError(
            f"{folder}: cannot be listed ({error.strerror}); restore what it names, or remove it to"
            " start the run again"
        ) from error
    numbers = {path: _NAME.fullmatch(path.name.removeprefix(prefix)) for path in paths}
    return {path: int(number[1]) for path, number in numbers.items() if number is not None}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step.

    Raises:
        CheckpointError: naming the steps that there are.
    """
    paths = checkpoint_paths(folder)
    if step not in paths:
        steps = ", ".join(map(str, sorted(paths))) or "none"
        raise CheckpointError(f"{folder}: holds no checkpoint of step {step}; it has {steps}")
    return paths[step]


def checked_manifest(path: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint of any run, after all of its files were compared.

    Raises:
        DamagedCheckpointError: if it differs from what was written.
        CheckpointError: if it has another format.
    """
    manifest = _manifest(path)
    try:
        manifest.check_files(path)
        read_index(path / TENSORS)
    except DamageError as error:
        raise DamagedCheckpointError(path, error) from error
    return manifest


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """Return tensors and plain values in torch's format: a copy that later steps do not change."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def _manifest(path: Path, step: int | None = None) -> CheckpointManifest:
    """Read the manifest of a checkpoint, of a step if it is given.

    Raises:
        DamagedCheckpointError: if it differs from what was written.
        CheckpointError: if it has another format.
    """
    if not os.path.isdir(path):  # noqa: PTH112 - False for every kind of error
        kind = (
            f"a link to {path.readlink()}, which is no folder" if path.is_symlink() else "no folder"
        )
        raise DamagedCheckpointError(path, f"{path}: is {kind}; restore it, or remove it")
    try:
        manifest = read_manifest(path)
    except DamageError as error:
        raise DamagedCheckpointError(path, error) from error
    except FormatError as error:
        raise CheckpointError(
            f"{error}; resume with the version that wrote it, or start again in another --run-dir"
        ) from error
    if step is not None and manifest.step != step:
        message = f"{path}: holds step {manifest.step}, not the step in its name"
        raise DamagedCheckpointError(path, message)
    return manifest


def _read(path: Path, manifest: CheckpointManifest) -> Checkpoint:
    """Compare a checkpoint's files with their checksums, and read those without tensors.

    Raises:
        DamagedCheckpointError: if it differs from what was written.
    """
    parts = sorted(name for name in manifest.files if name.startswith("ledger-"))
    try:
        manifest.check_files(path)
        read_index(path / TENSORS)
        return Checkpoint(
            step=manifest.step,
            tensors=path / TENSORS,
            update_state=torch.load(path / _UPDATE, weights_only=True),
            ledger=tuple(
                ledger_pb2.LedgerSnapshot.FromString((path / name).read_bytes()) for name in parts
            ),
        )
    except DamageError as error:
        raise DamagedCheckpointError(path, error) from error
    except _UNREADABLE as error:
        cause = f"{type(error).__name__}: {error}"
        raise DamagedCheckpointError(path, f"{path}: cannot be read ({cause:.200})") from error


def _folder_name(step: int) -> str:
    """Return the name of a step's folder; a folder with another spelling is not a checkpoint."""
    return f"step-{step:08d}"
