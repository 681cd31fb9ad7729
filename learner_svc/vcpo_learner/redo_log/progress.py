"""How far the redo log has come: what is committed, who waits for it, and what happened."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Final

from vcpo_learner.checkpoints.disk import size_text
from vcpo_learner.ledger.changes import LogRoom

_GROWTHS: Final = 4
"""A checkpoint is due when the log has grown by this share of its limit since the last one. With
the older changes that a checkpoint leaves, half of the limit, and what arrives while it is written,
the log stays below its limit."""
DISK_FULL: Final = "DiskFull"
"""Kind of the event that the log cannot be written."""


class LogProgress:
    """What the event loop knows of the log. Owner: the event loop; the thread's news come to it."""

    def __init__(self, path: Path, *, limit_bytes: int, retry_s: float) -> None:
        """path, limit_bytes, retry_s: as `RedoLog` has them, for its messages."""
        self._path = path
        self._limit_bytes = limit_bytes
        self._retry_s = retry_s
        self.committed = 0
        """Position of the newest change that outlives this process."""
        self.size_bytes = 0
        """Size of the changes that a checkpoint needs."""
        self._kept_bytes = 0
        """Size of the log after the newest checkpoint of this process."""
        self.events: list[tuple[str, str]] = []
        """Kind and message of each, until somebody takes them."""
        self.failure: Exception | None = None
        """The error that ended the thread; None while it runs."""
        self._error: str | None = None
        """Why the last write failed; None after one that succeeded."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def room(self) -> LogRoom:
        """Whether there is room for more changes."""
        if self._error is not None:
            return LogRoom.UNWRITABLE
        return LogRoom.FULL if self.size_bytes >= self._limit_bytes else LogRoom.FREE

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether a checkpoint should let go of changes, long before the log is full."""
        grown_bytes = self.size_bytes - self._kept_bytes
        return grown_bytes >= self._limit_bytes / _GROWTHS or self.room is LogRoom.FULL

    async def wait_for(self, position: int) -> None:
        """Wait until the changes up to a position outlive this process.

        Raises: what ended the thread.
        """
        self.check()
        if self.committed < position:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((position, written))
            await written

    def check(self) -> None:
        """Raise what ended the thread."""
        if self.failure is not None:
            raise self.failure

    def note_commit(self, position: int, size_bytes: int) -> None:
        """Changes up to a position were committed; size_bytes: of those of this commit."""
        self.committed = position
        while self._waiting and self._waiting[0][0] <= position:
            _, written = self._waiting.popleft()
            if not written.done():
                written.set_result(None)
        was_full = self.size_bytes >= self._limit_bytes
        self.size_bytes += size_bytes
        if self.room is LogRoom.FULL and not was_full:
            message = (
                f"{self._path} holds {size_text(self.size_bytes)} and may hold"
                f" {size_text(self._limit_bytes)} (spec.checkpoint.redoLogGibibytes): a checkpoint"
                " is written after this step, and until then work is granted for one step at a time"
            )
            self.events.append(("LogFull", message))

    def note_freed(self, size_bytes: int) -> None:
        """A checkpoint let go of changes; size_bytes: of those that it let go."""
        was_full = self.room is LogRoom.FULL
        self.size_bytes -= size_bytes
        self._kept_bytes = self.size_bytes
        if was_full and self.room is LogRoom.FREE:
            self.events.append(
                ("LogHasRoom", f"{self._path} holds {size_text(self.size_bytes)} now")
            )

    def note_error(self, error: str) -> None:
        """A write failed and will be tried again."""
        if self._error is None:
            message = (
                f"{self._path}: {error}; nothing is lost: no work is granted and no submission is"
                f" answered until it is written; the next attempts follow every {self._retry_s:g} s"
            )
            self.events.append((DISK_FULL, message))
        self._error = error

    def note_room(self) -> None:
        """A write that had failed succeeded."""
        self._error = None
        self.events.append(("DiskHasRoom", f"{self._path} is written again"))

    def note_failure(self, error: Exception) -> None:
        """The thread ended: nothing is committed any more."""
        self.failure = error
        for _, written in self._waiting:
            if not written.done():
                written.set_exception(error)
        self._waiting.clear()
