"""The key of one worker's own, to which the learner binds the worker's name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vcpo.wire.access.roles import new_key


def worker_identity(file: Path | None) -> str:
    """Return a new key, or the one that an earlier process of this worker left in a file.

    file: where the key is kept, readable for this user alone; None keeps it in this process.

    Raises:
        OSError: if the file can neither be read nor made.
    """
    if file is None:
        return new_key()
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as created:
            created.write(new_key())
    # A process that was killed before it had written the key leaves an empty file.
    return file.read_text(encoding="ascii") or new_key()


def forget_identity(file: Path | None) -> None:
    """Remove the file, so that the next process of this worker has a key of its own."""
    if file is not None:
        file.unlink(missing_ok=True)
