"""Files of a run are for its user alone: they hold prompts and answers.

A process that writes into a run directory calls `keep_files_private` once, at its start, and so do
the processes that it starts: folders get the mode 0700 and files 0600, whoever creates them. What
others use too, model caches and a store of versions on a volume, keeps the mode of the user's own
umask.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PRIVATE: Final = 0o077
_USERS_VARIABLE: Final = "VCPO_USER_UMASK"
"""Environment variable with the user's umask, in octal, for the processes that a process starts."""


def keep_files_private() -> None:
    """Let only this user read what this process and its children create from now on."""
    os.environ.setdefault(_USERS_VARIABLE, f"{os.umask(_PRIVATE):o}")
    os.umask(_PRIVATE)


@contextlib.contextmanager
def shared_files() -> Iterator[None]:
    """Create files with the user's own umask in the block.

    The umask is one for all threads, so nothing else may write into the run directory meanwhile.
    """
    before = os.umask(_users_umask())
    try:
        yield
    finally:
        os.umask(before)


def share(path: Path) -> None:
    """Give a file the mode that it would have with the user's own umask."""
    path.chmod(0o666 & ~_users_umask())


def _users_umask() -> int:
    given = os.environ.get(_USERS_VARIABLE)
    if given is not None:
        return int(given, 8)
    current = os.umask(_PRIVATE)  # there is no other way to read it
    os.umask(current)
    return current
