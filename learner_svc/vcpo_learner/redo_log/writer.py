r"""Writes rows into the file of the redo log: from the event loop, or from a thread beside it.

```
event loop   append --> written here, if the disk is quick and the thread does not use the file
                  \                          wait_until_kept() ......... answers the submission
                   \ else                        ^
thread              all that wait in one commit --'       a sync every second, old changes go
```

To hand a change to the thread costs several times as much as to write it: the two take turns at the
interpreter. A write goes to the kernel's memory and so takes microseconds, but a disk that the
kernel waits for would stop every worker. So the loop leaves the file to the thread while that syncs
or removes, for the time after a slow write, and for changes that are large.

A disk that is full or fails loses nothing: the changes wait in memory, submissions are not
answered, no version is announced and no lease is granted until they are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from vcpo_learner.clock import Clock
from vcpo_learner.ledger.changes import LogRoom
from vcpo_learner.redo_log.file import LogFile, Row, aside_path
from vcpo_learner.redo_log.progress import LogProgress

_SYNC_S: Final = 1.0
"""Time between two syncs, and so what a machine that fails may lose: a sync for each commit would
cost more than the commit."""
_AT_ONCE_BYTES: Final = 1 << 20
"""A larger change takes the event loop longer to copy than to hand over."""
_SLOW_S: Final = 0.05
"""A write that takes so long waited for the disk."""
_SLOW_PAUSE_S: Final = 1.0
"""Time after a slow write in which the thread does all of them."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteCheckpoint:
    """A checkpoint that is complete: changes that no kept one needs may go."""

    step: int
    position: int
    kept_steps: Collection[int]


class _Unsynced(Enum):
    """News for the thread: the event loop has written something."""

    WRITTEN = "written"


_Entry = Row | CompleteCheckpoint | _Unsynced
"""A change to write, a checkpoint after earlier changes, or one that is written and not synced."""


class _ClosedError(Exception):
    """The log was closed while its disk failed."""


class LogWriter:
    """Writes the file of one log. Owner: the event loop; its thread shares the file."""

    def __init__(
        self,
        file: LogFile,
        progress: LogProgress,
        *,
        limit_bytes: int,
        retry_s: float,
        clock: Clock,
    ) -> None:
        """limit_bytes, retry_s, clock: as `RedoLog`."""
        self.file = file
        """May be replaced until the first write."""
        self.file_lock = threading.Lock()
        """Held by whoever uses the file once the thread runs."""
        self._progress = progress
        self._limit_bytes = limit_bytes
        self._retry_s = retry_s
        self._clock = clock
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._is_unsynced = False
        """Whether the thread knows of a write of the event loop since its last sync."""
        self._slow_until_s = -math.inf
        """Time until which the thread does all writes, because the disk was slow."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def write(self, row: Row) -> None:
        """Write a row at once, or let the thread do it, after all earlier ones."""
        if not self._is_written_at_once(row):
            self._put(row)

    def add_checkpoint(self, checkpoint: CompleteCheckpoint) -> None:
        """Let the thread remove what no kept checkpoint needs."""
        self._put(checkpoint)

    def close(self) -> None:
        """Write what waits, unless the disk fails, and close the file; waits for that."""
        self._entries.put(None)
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.file.close()

    def _is_written_at_once(self, row: Row) -> bool:
        """Write the newest change, unless the thread has work or the disk is slow."""
        progress, begun_s = self._progress, self._clock()
        if (
            progress.committed != row.position - 1
            or progress.room is LogRoom.UNWRITABLE
            or progress.failure is not None
            or begun_s < self._slow_until_s
            or len(row.data) > _AT_ONCE_BYTES
            or not self.file_lock.acquire(blocking=False)
        ):
            return False
        try:
            self.file.append([row])
        except Exception:  # noqa: BLE001 - the thread tries it too, and says what it is
            return False
        else:
            was_unsynced, self._is_unsynced = self._is_unsynced, True
        finally:
            self.file_lock.release()
        progress.note_commit(row.position, len(row.data))
        if not was_unsynced:
            self._put(_Unsynced.WRITTEN)
        if (ended_s := self._clock()) - begun_s >= _SLOW_S:
            self._slow_until_s = ended_s + _SLOW_PAUSE_S
        return True

    def _put(self, entry: _Entry) -> None:
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._write, name="redo-log", daemon=True)
            self._thread.start()
        self._entries.put(entry)

    def _tell(self, note: Callable[..., None], *arguments: object) -> None:
        """Call a method on the event loop, from the thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(note, *arguments)

    def _write(self) -> None:
        """Run the thread."""
        try:
            self._write_until_closed()
        except _ClosedError:
            return
        except Exception as error:  # whoever waits for a commit must not wait for ever
            self._tell(self._progress.note_failure, error)
            raise

    def _write_until_closed(self) -> None:
        """Write entries, and remove old changes whenever there is nothing to write."""
        removable, sync_at_s = 0, math.inf
        while True:
            patience_s = None if sync_at_s == math.inf else max(0.0, sync_at_s - time.monotonic())
            entries, is_last = _take_all(self._entries, timeout_s=0.0 if removable else patience_s)
            if rows := [entry for entry in entries if isinstance(entry, Row)]:
                self._until_written(partial(self.file.append, rows))
                size_bytes = sum(len(row.data) for row in rows)
                self._tell(self._progress.note_commit, rows[-1].position, size_bytes)
            if rows or _Unsynced.WRITTEN in entries:
                sync_at_s = min(sync_at_s, time.monotonic() + _SYNC_S)
            if is_last or time.monotonic() >= sync_at_s:
                self._until_written(self._sync)
                sync_at_s = math.inf
            for entry in entries:
                if isinstance(entry, CompleteCheckpoint):
                    removable, freed_bytes = self._until_written(
                        partial(self._forget_before, entry)
                    )
                    self._tell(self._progress.note_freed, freed_bytes)
            if is_last:
                return
            if removable:
                is_more = self._until_written(partial(self.file.remove_some, removable))
                removable = removable if is_more else 0

    def _sync(self) -> None:
        # First, and with the file: a later write of the event loop asks for another sync.
        self._is_unsynced = False
        self.file.sync()

    def _forget_before(self, checkpoint: CompleteCheckpoint) -> tuple[int, int]:
        """Remember a checkpoint; return the position up to which changes may go, and their size."""
        aside_path(self.file.path).unlink(missing_ok=True)
        size_bytes = self.file.size_bytes
        removable = self.file.add_checkpoint(
            checkpoint.step,
            checkpoint.position,
            kept_steps=checkpoint.kept_steps,
            most_bytes=self._limit_bytes // 2,
        )
        return removable, size_bytes - self.file.size_bytes

    def _until_written(self, write: Callable[[], _Result]) -> _Result:
        """Call `write` with the file until it succeeds.

        Raises:
            _ClosedError: if the log is closed meanwhile.
            sqlite3.Error, FileNotFoundError: if the file is damaged or gone, which no room on the
                disk cures. This ends the learner; the next one reads what can be read.
        """
        has_failed = False
        while True:
            try:
                with self.file_lock:
                    result = write()
            except FileNotFoundError:
                raise
            except (sqlite3.OperationalError, OSError) as error:
                has_failed = True
                self._tell(self._progress.note_error, str(error))
                if self._closing.wait(self._retry_s):
                    raise _ClosedError from error
            else:
                if has_failed:
                    self._tell(self._progress.note_room)
                return result


def _take_all(
    entries: SimpleQueue[_Entry | None], *, timeout_s: float | None
) -> tuple[list[_Entry], bool]:
    """Return all entries that are there, and whether they are the last ones.

    timeout_s: how long to wait for the first one; None waits without an end.
    """
    taken: list[_Entry] = []
    with contextlib.suppress(Empty):
        while True:
            entry = entries.get_nowait() if taken else entries.get(timeout=timeout_s)
            if entry is None:
                return taken, True
            taken.append(entry)
    return taken, False
