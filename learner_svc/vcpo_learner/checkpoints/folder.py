"""The checkpoints of a run: everything that a learner needs to resume it.

```
checkpoints/step-00000050/   tensors/           parameters and moments, safetensors of each rank
                             ledger-00000.pb    open leases and counts; buffered trajectories,
                             ledger-00001.pb    in as many files as they need
                             update.pt          calibration, warning, replay, random generators
                             meta.json          step, spec that a resume must share, checksums
            damaged-step-00000100/   a damaged checkpoint, until the next one is written
```

The newest checkpoint whose files all have their checksums is read.
"""

import contextlib
import io
import os
import pickle
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from google.protobuf.message import DecodeError

from vcpo.api import VCPORun, continuation_changes, continuation_document
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.checkpoints.manifest import (
    CheckpointError,
    CheckpointManifest,
    DamageError,
    FileChecksum,
    atomic_folder,
)

TENSORS: Final = "tensors"
"""Name of the folder with parameters and moments in a checkpoint."""

_STEP, _DAMAGED = "step-", "damaged-"
_UPDATE, _LEDGER = "update.pt", "ledger-{:05d}.pb"
_UNREADABLE = (DecodeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError)


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
    def writing(self, step: int) -> Iterator[Path]:
        """Yield a folder that becomes a checkpoint after the block; `complete` fills it.

        Raises:
            WriteError: if the disk does not take it; the other checkpoints stay.
        """
        for abandoned in self._folder.glob(".step-*.partial"):
            shutil.rmtree(abandoned, ignore_errors=True)
        with atomic_folder(self.path(step)) as partial:
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
        files = {f"{TENSORS}/{name}": checksum for name, checksum in tensors.items()}
        names = [_UPDATE]
        (partial / _UPDATE).write_bytes(update_state)
        for number, part in enumerate(ledger):
            names.append(_LEDGER.format(number))
            (partial / names[-1]).write_bytes(part.SerializeToString())
        files |= {name: FileChecksum.of(partial / name) for name in names}
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
        removed = [self.path(step) for step in steps if step not in kept and step != best]
        for path in (*removed, *self._folder.glob(f"{_DAMAGED}*")):
            shutil.rmtree(path, ignore_errors=True)
        return kept

    def steps(self) -> list[int]:
        return sorted(checkpoint_paths(self._folder))

    def healthy_steps(self) -> list[int]:
        found = []
        for step in self.steps():
            with contextlib.suppress(DamageError, CheckpointError):
                if CheckpointManifest.read(self.path(step)).healthy:
                    found.append(step)
        return found

    def path(self, step: int) -> Path:
        return self._folder / f"{_STEP}{step:08d}"

    def load_newest(self) -> tuple[Checkpoint | None, tuple[DamagedCheckpointError, ...]]:
        """Read the newest intact checkpoint; also return the errors of newer, damaged ones.

        Returns None as the checkpoint if there is none.
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

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of a step, after all of its files were compared.

        Raises:
            DamagedCheckpointError: if it differs from what was written.
        """
        path = checkpoint_path(self._folder, step)
        manifest = checked_manifest(path)
        if manifest.step != step:
            raise DamagedCheckpointError(path, f"{path}: holds step {manifest.step}")
        require_same_spec(path, manifest.spec, self._spec)
        parts = sorted(name for name in manifest.files if name.startswith("ledger-"))
        try:
            return Checkpoint(
                step=step,
                tensors=path / TENSORS,
                update_state=torch.load(path / _UPDATE, weights_only=True),
                ledger=tuple(
                    ledger_pb2.LedgerSnapshot.FromString((path / name).read_bytes())
                    for name in parts
                ),
            )
        except (*_UNREADABLE, pickle.UnpicklingError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise DamagedCheckpointError(path, f"{path}: cannot be read ({cause:.200})") from error

    def set_aside(self, damaged: Iterable[DamagedCheckpointError]) -> None:
        """Rename damaged checkpoints, so that they are not tried or counted again."""
        for one in damaged:
            aside = one.path.with_name(_DAMAGED + one.path.name)
            shutil.rmtree(aside, ignore_errors=True)
            one.path.rename(aside)


def kept_steps(
    steps: Sequence[int], *, keep: int, good: Collection[int], good_age_steps: int
) -> set[int]:
    """Return the steps whose checkpoints stay: the newest ones, and those for a rollback.

    For a rollback there is the newest good one that is old enough, and the one that is the next to
    be. Where they are not among the newest ones, they take the places of the oldest of these, but
    never that of the very last.

    steps: in ascending order, at least one.
    keep: number of newest ones, at least 1.
    good: steps that a rollback may go back to when they are old enough; empty without rollbacks.
    good_age_steps: steps from a checkpoint to the newest one after which it is old enough.
    """
    newest = list(steps[-keep:])
    aged = max((step for step in good if step <= steps[-1] - good_age_steps), default=-1)
    next_aged = min((step for step in good if step > aged), default=-1)
    needed = {aged, next_aged} & set(steps)
    replaceable = [step for step in newest[:-1] if step not in needed]
    replaced = replaceable[: len(needed - set(newest))]
    return needed | set(newest) - set(replaced)


def best_evaluated_step(accuracies: Mapping[int, float], steps: Collection[int]) -> int | None:
    """Return the step among `steps` with the best accuracy, the latest of equal ones.

    accuracies: of evaluations, by the step at which each began.

    Returns None if none of the steps was evaluated.
    """
    evaluated = [step for step in accuracies if step in steps]
    return max(evaluated, key=lambda step: (accuracies[step], step), default=None)


def require_same_spec(path: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Check that a file of a run may be resumed under a spec; both are continuation documents."""
    if changes := ", ".join(continuation_changes(before, after)):
        raise CheckpointError(
            f"{path}: belongs to a run with another spec ({changes}); change it back to resume,"
            " or start a new run"
        )


def checkpoint_paths(folder: Path) -> dict[int, Path]:
    """Return what has the name of a checkpoint, by step, usable or not."""
    if not os.path.lexists(folder):
        return {}
    numbers = {path: path.name.removeprefix(_STEP) for path in folder.iterdir()}
    return {
        int(number): path
        for path, number in numbers.items()
        if number.isdecimal() and path.name == f"{_STEP}{int(number):08d}"
    }


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step."""
    paths = checkpoint_paths(folder)
    if step not in paths:
        steps = ", ".join(map(str, sorted(paths))) or "none"
        raise CheckpointError(f"{folder}: holds no checkpoint of step {step}; it has {steps}")
    return paths[step]


def checked_manifest(path: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint of any run, after all of its files were compared.

    Raises:
        DamagedCheckpointError: if it differs from what was written.
    """
    try:
        manifest = CheckpointManifest.read(path)
        manifest.check_files(path)
    except DamageError as error:
        raise DamagedCheckpointError(path, error) from error
    return manifest


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """Return tensors and plain values in torch's format: a copy that later steps do not change."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()
