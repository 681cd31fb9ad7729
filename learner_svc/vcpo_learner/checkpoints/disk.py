"""Folders that are written completely or not at all, even on a full disk.

A folder is written under another name, synced and renamed. If the disk has no room, the error says
for what, where and how much is missing. The incomplete folder is removed, so that the next attempt
finds as much free space as before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MEBIBYTE = 1 << 20
_GIBIBYTE = 1 << 30


class DiskFullError(OSError):
    """The disk has no room; the message says for what, where and how much is missing."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def atomic_folder(target: Path, *, what: str, needed_bytes: int) -> Iterator[Path]:
    """Yield a folder that replaces `target` after the block; remove it if the block raises.

    what: what is written, in words, for the error.
    needed_bytes: about how much is written, for the error.

    Raises:
        DiskFullError: if the disk has no room for it.
    """
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        # The new name must be on the disk before the old folder is removed.
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:  # an interrupt must not leave an incomplete folder either
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception):
            _raise_if_disk_full(error, what=what, folder=target.parent, needed_bytes=needed_bytes)
        raise


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        SafetensorError: if it cannot be written; the text holds the system's error number.
    """
    save_file(tensors, path, metadata={"format": "pt"})


def _raise_if_disk_full(error: Exception, *, what: str, folder: Path, needed_bytes: int) -> None:
    """Raise `DiskFullError` if an error means that the disk is full.

    Raises:
        DiskFullError: naming the folder, the needed and the free space.
    """
    # Libraries written in Rust put the system's error number into the text only.
    found = _OS_ERROR.search(str(error))
    code = int(found[1]) if found else getattr(error, "errno", None)
    if code not in _NO_ROOM:
        return
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    sizes = f"{size_text(needed_bytes)} are needed and {size_text(free_bytes)} are free"
    missing = needed_bytes - free_bytes
    limit = f"{size_text(missing)} are missing" if missing > 0 else f"({os.strerror(code)})"
    message = f"{folder}: no room for {what}: {sizes}, {limit}"
    raise DiskFullError(code, message) from error


def size_text(size_bytes: int) -> str:
    """Return a size for people, in MiB or GiB."""
    if size_bytes >= _GIBIBYTE:
        return f"{size_bytes / _GIBIBYTE:,.1f} GiB"
    return f"{size_bytes / _MEBIBYTE:,.1f} MiB"


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; 0 if there is none."""
    sizes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it meanwhile
            sizes += path.stat().st_size
    return sizes


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceNeed:
    """What a run writes, in bytes."""

    checkpoint_bytes: int
    """Tensors of one checkpoint."""
    num_checkpoints: int
    """Most checkpoints on the disk at once, with the one that is being written."""
    model_bytes: int
    """The final model, and adapters."""

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.num_checkpoints * self.checkpoint_bytes + self.model_bytes


def lacks_one_checkpoint(need: SpaceNeed, *, free_bytes: int) -> bool:
    """Return whether not even the next checkpoint fits."""
    return free_bytes < need.checkpoint_bytes


def space_warning(need: SpaceNeed, *, free_bytes: int, held_bytes: int) -> str | None:
    """Return a sentence with the numbers and the fields if not everything fits; else None.

    held_bytes: of checkpoints that are there already; later ones take their place.
    """
    missing_bytes = need.total_bytes - held_bytes - free_bytes
    if missing_bytes <= 0:
        return None
    return (
        f"{size_text(free_bytes)} are free and {size_text(missing_bytes)} are missing for"
        f" {need.num_checkpoints} checkpoints of {size_text(need.checkpoint_bytes)} each"
        f" (spec.checkpoint.keep, keepBest, and the one being written) and the model of"
        f" {size_text(need.model_bytes)}; lower spec.checkpoint.keep, or give more room (in a"
        " cluster spec.learner.checkpointStorageGibibytes)"
    )


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
