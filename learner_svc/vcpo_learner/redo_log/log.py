r"""Writes the changes of the ledger to the redo log, beside the event loop.

```
event loop   append   append  append   committed() ......... answers the submission
                  \       \      |                        ^
thread             write 1  write 2 and 3 in one commit  --'
```

While one commit is on its way to the disk, more changes arrive; the next commit takes them all. A
disk that is full or fails loses nothing: the changes wait in memory, submissions are not answered,
no version is announced and no lease is granted until they are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from vcpo.service.lifecycle import StartError
from vcpo_learner.checkpoints.disk import size_text
from vcpo_learner.ledger.changes import Change, InconsistentChangeError, LogRoom
from vcpo_learner.ledger.contents import LedgerContents
from vcpo_learner.redo_log.encoding import (
    UnreadableChangeError,
    change_from_bytes,
    change_to_bytes,
)
from vcpo_learner.redo_log.file import (
    DamagedLogError,
    LogFile,
    Row,
    aside_path,
    file_path,
    replace_damaged,
)
from vcpo_learner.redo_log.redo import Redo

DISK_FULL: Final = "DiskFull"
"""Kind of the event that the log cannot be written."""
RETRY_S: Final = 5.0
"""Time between two attempts on a disk that is full or fails."""
_SYNC_S: Final = 1.0
"""What a machine that fails may lose: a sync for each commit would cost more than the commit."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """A checkpoint that is complete: changes that no kept one needs may go."""

    step: int
    position: int
    kept_steps: Collection[int]


_Entry = Row | _Checkpoint
"""A change, or a checkpoint after earlier changes."""


class _ClosedError(Exception):
    """The log was closed while its disk failed."""


class RedoLog:
    """The redo log of one run; a `ChangeLog`. Owner: the event loop; its thread has the file.

    A learner that resumes calls `redo` before the first change is appended.
    """

    def __init__(self, run_dir: Path, *, limit_bytes: int, retry_s: float = RETRY_S) -> None:
        """Open the file of a run directory, and create it if there is none.

        limit_bytes: size of the changes that a checkpoint needs, from which on the log is full.
        retry_s: seconds between two attempts on a disk that is full or fails.

        Raises:
            StartError: if it cannot be opened, naming it and the cure.
        """
        self._path = file_path(run_dir)
        self._limit_bytes = limit_bytes
        self._retry_s = retry_s
        self._events: list[tuple[str, str]] = []
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._position = self._committed = self._file.last_position
            self._size_bytes = self._file.size_bytes
        except (sqlite3.Error, OSError) as error:
            raise StartError(
                f"{self._path}: the redo log cannot be opened ({error}); make the folder writable,"
                " on a disk with room and with file locks"
            ) from error
        self._error: str | None = None
        """Why the last write failed; None after one that succeeded."""
        self._failure: Exception | None = None
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def position(self) -> int:
        """Number of the newest change; 0 before the first."""
        return self._position

    @property
    def room(self) -> LogRoom:
        """Whether there is room for more changes."""
        if self._error is not None:
            return LogRoom.UNWRITABLE
        return LogRoom.FULL if self._size_bytes >= self._limit_bytes else LogRoom.FREE

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """The parts of the spec that a resume must share, as stored; None if none can be read."""
        try:
            found: Mapping[str, Any] = json.loads(self._file.spec)
        except (sqlite3.DatabaseError, ValueError):  # a new file, or damage that `redo` reports
            return None
        return found

    def set_spec(self, spec: Mapping[str, Any]) -> None:
        """Store the parts of the spec that a resume must share; before the first change.

        Raises:
            StartError: if the disk fails, naming the file and the cure.
        """
        try:
            self._file.set_spec(json.dumps(spec))
        except sqlite3.Error as error:
            raise StartError(
                f"{self._path}: the redo log cannot be written ({error}); make room on its disk"
            ) from error

    def redo(self, contents: LedgerContents, *, after: int) -> Redo:
        """Apply the changes after a position, up to the first that cannot be read; go on from it.

        after: position of the last change that the contents have.
        """
        redo, last = Redo(contents), after
        try:
            for row in self._file.read(after):
                redo.apply(change_from_bytes(row.data))
                last = row.position
        except DamagedLogError as error:
            self._replace_damaged(after, last, str(error))
        except (UnreadableChangeError, InconsistentChangeError) as error:
            cause = f"{self._path}: change {last + 1} cannot be redone ({error})"
            self._replace_damaged(after, last, cause)
        self._position = self._committed = last
        return redo

    def append(self, change: Change) -> None:
        """Take a change; it is written in the background, after all earlier ones.

        It becomes bytes here: that needs the interpreter wherever it is done, and what has just
        arrived is still in the processor's cache.
        """
        data = change_to_bytes(change)  # first: after an error there must be no gap
        self._position += 1
        self._put(Row(position=self._position, data=data))

    async def committed(self) -> None:
        """Wait until every change so far outlives this process.

        Raises: what ended the thread: damage, or a bug. A disk that fails is waited for.
        """
        self.check()
        if self._committed < self._position:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self._position, written))
            await written

    def check(self) -> None:
        """Raise what ended the thread; as `committed`."""
        if self._failure is not None:
            raise self._failure

    def add_checkpoint(self, step: int, position: int, *, kept_steps: Collection[int]) -> None:
        """Let go of the changes that no kept checkpoint needs.

        step, position: of a checkpoint that is complete, and of the last change that it holds.
        kept_steps: steps of the checkpoints from which a learner may resume, this one among them.
        """
        self._put(_Checkpoint(step=step, position=position, kept_steps=kept_steps))

    def take_events(self) -> list[tuple[str, str]]:
        """Return kind and message of each event since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Write what waits, unless the disk fails, and close the file; waits for that."""
        self._entries.put(None)
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._file.close()

    def _open(self) -> LogFile:
        try:
            return LogFile(self._path)
        except DamagedLogError as error:
            aside = replace_damaged(self._path, None)
            self._report_damage(str(error), 0, aside)
            return LogFile(self._path)

    def _replace_damaged(self, after: int, last: int, cause: str) -> None:
        """Go on in a new file that holds the changes that can be read; set the old one aside."""
        aside = replace_damaged(self._path, self._file, after=after, last=last)
        self._file = LogFile(self._path)
        self._size_bytes = self._file.size_bytes
        self._report_damage(cause, last - after, aside)

    def _report_damage(self, cause: str, num_read: int, aside: Path) -> None:
        what = f"the {num_read} changes before it are used, later ones are lost"
        self._events.append(
            ("LogDamaged", f"{cause}; {what}; the file is kept as {aside.name} until a checkpoint")
        )

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
            self._tell(self._note_failure, error)
            raise

    def _write_until_closed(self) -> None:
        """Write entries, and remove old changes whenever there is nothing to write."""
        removable, unsynced_since_s = 0, math.inf
        while True:
            patience_s = None if unsynced_since_s == math.inf else _SYNC_S
            entries, is_last = _take_all(self._entries, timeout_s=0.0 if removable else patience_s)
            if rows := [entry for entry in entries if isinstance(entry, Row)]:
                self._until_written(partial(self._file.append, rows))
                size_bytes = sum(len(row.data) for row in rows)
                self._tell(self._note_commit, rows[-1].position, size_bytes)
                unsynced_since_s = min(unsynced_since_s, time.monotonic())
            if is_last or time.monotonic() - unsynced_since_s >= _SYNC_S:
                self._until_written(self._file.sync)
                unsynced_since_s = math.inf
            for entry in entries:
                if isinstance(entry, _Checkpoint):
                    removable = self._until_written(partial(self._forget_before, entry))
                    self._tell(self._note_size, self._file.size_bytes)
            if is_last:
                return
            if removable:
                is_more = self._until_written(partial(self._file.remove_some, removable))
                removable = removable if is_more else 0

    def _forget_before(self, checkpoint: _Checkpoint) -> int:
        """Remember a checkpoint; return the position up to which changes may go."""
        aside_path(self._path).unlink(missing_ok=True)
        return self._file.add_checkpoint(
            checkpoint.step, checkpoint.position, kept_steps=checkpoint.kept_steps
        )

    def _until_written(self, write: Callable[[], _Result]) -> _Result:
        """Call `write` until it succeeds.

        Raises:
            _ClosedError: if the log is closed meanwhile.
            sqlite3.Error, FileNotFoundError: if the file is damaged or gone, which no room on the
                disk cures. This ends the learner; the next one reads what can be read.
        """
        has_failed = False
        while True:
            try:
                result = write()
            except FileNotFoundError:
                raise
            except (sqlite3.OperationalError, OSError) as error:
                has_failed = True
                self._tell(self._note_error, str(error))
                if self._closing.wait(self._retry_s):
                    raise _ClosedError from error
            else:
                if has_failed:
                    self._tell(self._note_room)
                return result

    def _note_commit(self, position: int, size_bytes: int) -> None:
        self._committed = position
        while self._waiting and self._waiting[0][0] <= position:
            _, written = self._waiting.popleft()
            if not written.done():
                written.set_result(None)
        was_full = self._size_bytes >= self._limit_bytes
        self._size_bytes += size_bytes
        if self.room is LogRoom.FULL and not was_full:
            message = (
                f"{self._path} holds {size_text(self._size_bytes)} and may hold"
                f" {size_text(self._limit_bytes)} (spec.checkpoint.redoLogGibibytes): a checkpoint"
                " is written after this step, and until then work is granted for one step at a time"
            )
            self._events.append(("LogFull", message))

    def _note_size(self, size_bytes: int) -> None:
        was_full = self.room is LogRoom.FULL
        self._size_bytes = size_bytes
        if was_full and self.room is LogRoom.FREE:
            self._events.append(
                ("LogHasRoom", f"{self._path} holds {size_text(self._size_bytes)} now")
            )

    def _note_error(self, error: str) -> None:
        if self._error is None:
            message = (
                f"{self._path}: {error}; nothing is lost: no work is granted and no submission is"
                f" answered until it is written; the next attempts follow every {self._retry_s:g} s"
            )
            self._events.append((DISK_FULL, message))
        self._error = error

    def _note_room(self) -> None:
        self._error = None
        self._events.append(("DiskHasRoom", f"{self._path} is written again"))

    def _note_failure(self, error: Exception) -> None:
        self._failure = error
        for _, written in self._waiting:
            if not written.done():
                written.set_exception(error)
        self._waiting.clear()


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
