"""Locks on a run directory: one host steers a run, one learner trains it.

A lock is `flock` on a file of the directory. The kernel lets go of it when its holder ends, however
it ends, so a lock never outlives its process; the file stays, and says who held it last.
Host and learner hold a file each: the learner of a host that was killed still saves its checkpoint,
and a learner may run without a host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

_LOGGER = logging.getLogger(__name__)
_POLL_S = 0.1
_WITHOUT_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class LockHolder(StrEnum):
    """Who locks a run directory."""

    HOST = "host"
    LEARNER = "learner"


class RunLockedError(OSError):
    """Another process works in the run directory; says which, and what to do."""


@contextlib.contextmanager
def run_lock(
    run_dir: Path,
    holder: LockHolder,
    *,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the lock of one kind of holder on a run directory, which is made if it is missing.

    patience_s: how long to wait for another process to let go.

    Raises:
        RunLockedError: when another process holds it for longer.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / f"{holder}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _try_lock(descriptor, path):
            _LOGGER.info("%s", _refusal(run_dir, holder, path))
            deadline_s = clock() + patience_s
            while not _try_lock(descriptor, path):
                if clock() >= deadline_s:
                    raise RunLockedError(_refusal(run_dir, holder, path))
                sleep(_POLL_S)
        _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_FLOCK:
            raise
        _LOGGER.warning("%s: this file system has no locks; nothing keeps a second run out", path)
    return True


def _sign(descriptor: int) -> None:
    """Write who holds the lock."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since_unix_s": time.time()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)


def _refusal(run_dir: Path, holder: LockHolder, path: Path) -> str:
    who = f"another {holder}"
    stop = "stop that process"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        signed = json.loads(path.read_text(encoding="utf-8"))
        since = datetime.fromtimestamp(signed["since_unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        who += f" (process {signed['pid']} on {signed['host']}, since {since} UTC)"
        stop = f"stop it (kill {signed['pid']})"
    return (
        f"{run_dir}: {who} works on this run; wait for its end, {stop}, or give another directory"
    )
