"""Folders that are written completely or not at all, even on a full disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


class WriteError(OSError):
    """A folder could not be written; the message names it and the cause."""


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that replaces `target` after the block; remove it if the block raises.

    Raises:
        WriteError: if the disk does not take it; the incomplete folder is removed, so that the next
            attempt finds as much free space as before.
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
        if isinstance(error, OSError | SafetensorError):
            raise WriteError(f"{target}: cannot be written ({error})") from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
