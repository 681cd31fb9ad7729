"""Locks on a run directory: at most one host and one learner work in it.

A lock is an `flock` on a file of the directory. The kernel releases it when its holder ends, for
whatever reason, so a lock never outlives its process. The file stays and names the last holder.
Host and learner have a lock each: the learner of a killed host still saves its checkpoint, and a
learner may run without a host.
"""

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
    """Another process works in the run directory; the text names it and the fix."""


@contextlib.contextmanager
def run_lock(
    run_dir: Path,
    holder: LockHolder,
    *,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold a holder's lock on a run directory; create the directory if it is missing.

    patience_s: seconds to wait for another process to release the lock.

    Raises:
        RunLockedError: if another process holds the lock longer.
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
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since_unix_s": time.time()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(owner) + "\n").encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_locked(run_dir: Path) -> bool:
    """Return whether a host or a learner holds its lock on a run directory."""
    for path in (run_dir / f"{holder}.lock" for holder in LockHolder):
        with contextlib.suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_FLOCK:
            raise
        _LOGGER.warning("%s: this file system has no locks; a second run is not prevented", path)
    return True


def _refusal(run_dir: Path, holder: LockHolder, path: Path) -> str:
    who = f"another {holder}"
    stop = "stop that process"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads(path.read_text(encoding="utf-8"))
        since = datetime.fromtimestamp(owner["since_unix_s"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        who += f" (process {owner['pid']} on {owner['host']}, since {since} UTC)"
        stop = f"stop it (kill {owner['pid']})"
    return (
        f"{run_dir}: {who} works on this run; wait until it ends, {stop}, or give another directory"
    )
