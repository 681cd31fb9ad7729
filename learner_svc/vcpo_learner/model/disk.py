"""Folders that are on the disk whole or not at all, also when the disk has no room for them.

A folder is written under another name, synced and renamed. Whoever has no room for it is told what,
where and how much is missing; what was written of it is removed, so that nothing stands in the way
of the next attempt.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MEBIBYTE = 1 << 20


class DiskFullError(OSError):
    """No room for what is to be written: says what, where, and how much is missing."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def atomic_folder(target: Path, *, what: str, needed_bytes: int) -> Iterator[Path]:
    """A folder to write into that replaces `target` when the block is done, and else is removed.

    what: in words, for the error.
    needed_bytes: about how much will be written, for the error.

    Raises:
        DiskFullError: when the disk has no room for it.
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
        # The new name must be on the disk before anything else goes.
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:  # an interrupt leaves nothing half-written either
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception):
            _raise_as_full(error, what=what, folder=target.parent, needed_bytes=needed_bytes)
        raise


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        SafetensorError: when it cannot be written, with the system's number in its text.
    """
    save_file(tensors, path, metadata={"format": "pt"})


def write_state(state: object, path: Path) -> None:
    """Write tensors and plain values in torch's format.

    Raises:
        OSError: when it cannot be written; torch itself would not say why.
    """
    file = _RememberingWriter(io.FileIO(path, "wb"))
    try:
        with contextlib.closing(file):
            torch.save(state, file)
    except RuntimeError as error:
        raise (file.error or error) from error


def nested_bytes(state: object) -> int:
    """Size of the tensors in nested dictionaries and lists."""
    match state:
        case torch.Tensor():
            return state.numel() * state.element_size()
        case dict():
            return sum(map(nested_bytes, state.values()))
        case list() | tuple():
            return sum(map(nested_bytes, state))
        case _:
            return 0


class _RememberingWriter(io.BufferedWriter):
    """A file that keeps the error that its user swallows."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            self.flush()
        except OSError as error:
            self.error = error
            raise
        return written


def _raise_as_full(error: Exception, *, what: str, folder: Path, needed_bytes: int) -> None:
    """Say it in a sentence when an error means that there is no room.

    Raises:
        DiskFullError: when it does.
    """
    # Libraries written in Rust keep the system's number in their text only.
    found = _OS_ERROR.search(str(error))
    code = int(found[1]) if found else getattr(error, "errno", None)
    if code not in _NO_ROOM:
        return
    free_bytes = shutil.disk_usage(_existing(folder)).free
    sizes = f"{_size(needed_bytes)} are needed and {_size(free_bytes)} are free"
    missing = needed_bytes - free_bytes
    limit = f"{_size(missing)} are missing" if missing > 0 else f"({os.strerror(code)})"
    message = f"{folder}: no room for {what}: {sizes}, {limit}"
    raise DiskFullError(code, message) from error


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _MEBIBYTE:,.1f} MiB"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
