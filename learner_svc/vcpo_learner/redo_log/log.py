r"""Writes the changes of the ledger to the redo log.

```
event loop   append --> written here, if the disk is quick and the thread does not use the file
                  \                          committed() ......... answers the submission
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
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from vcpo.service.lifecycle import StartError
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.changes import Change, InconsistentChangeError, LogRoom
from vcpo_learner.ledger.contents import LedgerContents, RecordedStep
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
    is_damage,
    replace_damaged,
)
from vcpo_learner.redo_log.log_end import LogEnd
from vcpo_learner.redo_log.logged_step import LoggedStep
from vcpo_learner.redo_log.progress import LogProgress
from vcpo_learner.redo_log.redo import Redo

RETRY_S: Final = 5.0
"""Time between two attempts on a disk that is full or fails."""
_SYNC_S: Final = 1.0
"""What a machine that fails may lose: a sync for each commit would cost more than the commit."""
_AT_ONCE_BYTES: Final = 1 << 20
"""A larger change takes the event loop longer to copy than to hand over."""
_SLOW_S: Final = 0.05
"""A write that takes so long waited for the disk."""
_SLOW_PAUSE_S: Final = 1.0
"""Time after a slow write in which the thread does all of them."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """A checkpoint that is complete: changes that no kept one needs may go."""

    step: int
    position: int
    kept_steps: Collection[int]


class _Unsynced(Enum):
    """News for the thread: the event loop has written something."""

    WRITTEN = "written"


_Entry = Row | _Checkpoint | _Unsynced
"""A change to write, a checkpoint after earlier changes, or one that is written and not synced."""


class _ClosedError(Exception):
    """The log was closed while its disk failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Damage:
    """Damage of the file, found at the start."""

    cause: str
    aside: Path | None
    """Where the damaged file is; None if it is the one that goes on."""
    loss: str = "nothing of it can be read"
    """What it costs, as clauses."""

    @property
    def message(self) -> str:
        """What the event says."""
        kept = (
            ""
            if self.aside is None
            else (f"; the file is kept as {self.aside.name} until a checkpoint")
        )
        return f"{self.cause}; {self.loss}{kept}"


class RedoLog:
    """The redo log of one run; a `ChangeLog`. Owner: the event loop; its thread shares the file.

    A learner that resumes calls `redo` before the first change is appended.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        limit_bytes: int,
        retry_s: float = RETRY_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """Open the file of a run directory, and create it if there is none.

        limit_bytes: size of the changes that a checkpoint needs, from which on the log is full.
        retry_s: seconds between two attempts on a disk that is full or fails.
        clock: what a write takes; the thread waits by the system's clock.

        Raises:
            StartError: if it cannot be opened, naming it and the cure.
        """
        self._path = file_path(run_dir)
        self._limit_bytes = limit_bytes
        self._retry_s = retry_s
        self._clock = clock
        self._progress = LogProgress(self._path, limit_bytes=limit_bytes, retry_s=retry_s)
        self.lost_changes = 0
        """Changes that were committed and that `redo` has not found; a lower bound if its event
        says so."""
        self._damage: _Damage | None = None
        """What was found damaged and is not reported yet."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._position = self._progress.committed = self._counted(
                lambda file: file.last_position
            )
            self._progress.size_bytes = self._counted(lambda file: file.size_bytes)
            self._counted(lambda file: len(file.checkpoints))
        except (sqlite3.Error, OSError) as error:
            raise StartError(
                f"{self._path}: the redo log cannot be opened ({error}); make the folder writable,"
                " on a disk with room and with file locks"
            ) from error
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._file_lock = threading.Lock()
        """Held by whoever uses the file once the thread runs."""
        self._is_unsynced = False
        """Whether the thread knows of a write of the event loop since its last sync."""
        self._slow_until_s = -math.inf
        """Until when the thread does all writes."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def position(self) -> int:
        """Number of the newest change; 0 before the first."""
        return self._position

    @property
    def is_used(self) -> bool:
        """Whether there is, or was, a change of an earlier process."""
        return self._position > 0 or self._damage is not None or bool(self._file.marked_position)

    @property
    def checkpoint_steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints from which the log goes on; none if they cannot be read."""
        try:
            return tuple(step for step, _ in self._file.checkpoints)
        except sqlite3.DatabaseError:  # damage that `redo` reports
            return ()

    @property
    def is_from_start(self) -> bool:
        """Whether the log can be redone without a checkpoint, as far as it can be read."""
        return not self.checkpoint_steps and self._counted(lambda file: file.first_position) <= 1

    @property
    def room(self) -> LogRoom:
        """Whether there is room for more changes."""
        return self._progress.room

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the log has grown so much that a checkpoint should let go of changes."""
        return self._progress.is_checkpoint_due

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

    def redo(self, contents: LedgerContents, *, after: int, recorded_step: int = 0) -> Redo:
        """Apply the changes after a position, up to the first that cannot be read; go on from it.

        What is missing becomes an event with its numbers.

        after: position of the last change that the contents have.
        recorded_step: last step that the journal has; where nothing else tells where the log must
            end, a log that ends before is reported.
        """
        last, held = after, self._counted(lambda file: file.last_position)
        redo = Redo(contents, self._changes)
        cause = None if self._damage is None else self._damage.cause
        try:
            for row in self._file.read(after):
                redo.apply(change_from_bytes(row.data), row.position)
                last = row.position
        except DamagedLogError as error:
            cause = str(error)
        except (UnreadableChangeError, InconsistentChangeError) as error:
            cause = f"{self._path}: change {last + 1} cannot be redone ({error})"
        end = LogEnd(
            redone=last,
            held=held,
            checkpoint=after,
            marked=self._file.marked_position,
            step=contents.step,
            recorded_step=recorded_step,
        )
        self._judge(end, cause)
        self._position = self._progress.committed = last
        return redo

    def read_step(self, step: LoggedStep) -> RecordedStep:
        """Read what a step was computed from; any thread may call it.

        Raises:
            DamagedLogError, UnreadableChangeError: if the log cannot be read any more. The learner
                ends; the next one finds the damage and says what it costs.
        """
        return step.read(self._changes)

    def append(self, change: Change) -> None:
        """Take a change; it is written at once or in the background, after all earlier ones.

        It becomes bytes here: that needs the interpreter wherever it is done, and what has just
        arrived is still in the processor's cache.
        """
        data = change_to_bytes(change)  # first: after an error there must be no gap
        self._position += 1
        row = Row(position=self._position, data=data)
        if not self._is_written_at_once(row):
            self._put(row)

    async def committed(self) -> None:
        """Wait until every change so far outlives this process.

        Raises: what ended the thread: damage, or a bug. A disk that fails is waited for.
        """
        await self._progress.committed_up_to(self._position)

    def check(self) -> None:
        """Raise what ended the thread; as `committed`."""
        self._progress.check()

    def add_checkpoint(self, step: int, position: int, *, kept_steps: Collection[int]) -> None:
        """Let go of the changes that no kept checkpoint needs.

        Where they fill half of the limit, those of the oldest checkpoints go too: such a checkpoint
        can still be resumed from, without the steps after it.

        step, position: of a checkpoint that is complete, and of the last change that it holds.
        kept_steps: steps of the checkpoints from which a learner may resume, this one among them.
        """
        self._put(_Checkpoint(step=step, position=position, kept_steps=kept_steps))

    def take_events(self) -> list[tuple[str, str]]:
        """Return kind and message of each event since the last call."""
        events, self._progress.events = self._progress.events, []
        if (damage := self._damage) is not None:
            self._damage = None
            events.insert(0, ("LogDamaged", damage.message))
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
            self._damage = _Damage(cause=str(error), aside=aside)
            return LogFile(self._path)

    def _counted(self, count: Callable[[LogFile], int]) -> int:
        """Return a number of the file; 0 if the file is too damaged, which is then known."""
        try:
            return count(self._file)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._damage = self._damage or _Damage(cause=f"{self._path}: {error}", aside=None)
            return 0

    def _judge(self, end: LogEnd, cause: str | None) -> None:
        """Report what a redo has not found; cause: the damage that ended it, None without any.

        A file with damage is set aside, and a new one holds the changes that can be read.
        """
        aside = None if self._damage is None else self._damage.aside
        if cause is not None and aside is None:
            after, last = end.checkpoint, end.redone
            aside = replace_damaged(self._path, self._file, after=after, last=last)
            self._file = LogFile(self._path)
            self._progress.size_bytes = self._file.size_bytes
        if cause is None and end.is_short:
            cause = f"{self._path}: {end.missing()}"
        if cause is not None:
            self.lost_changes = end.num_lost
            self._damage = _Damage(cause=cause, aside=aside, loss=end.loss())
        elif end.is_unknown:
            message = (
                f"{self._path}: its mark cannot be read, so nothing says whether change {end.held}"
                " is its last; the changes that it holds are used"
            )
            self._progress.events.append(("LogMarkLost", message))

    def _changes(self, positions: Sequence[int]) -> Iterator[Change]:
        """Yield the changes at some positions; the file is free between two of them."""
        for position in positions:
            with self._file_lock:
                row = self._file.read_one(position)
            yield change_from_bytes(row.data)

    def _is_written_at_once(self, row: Row) -> bool:
        """Write the newest change, unless the thread has work or the disk is slow."""
        progress, begun_s = self._progress, self._clock()
        if (
            progress.committed != row.position - 1
            or progress.room is LogRoom.UNWRITABLE
            or progress.failure is not None
            or begun_s < self._slow_until_s
            or len(row.data) > _AT_ONCE_BYTES
            or not self._file_lock.acquire(blocking=False)
        ):
            return False
        try:
            self._file.append([row])
        except Exception:  # noqa: BLE001 - the thread tries it too, and says what it is
            return False
        else:
            was_unsynced, self._is_unsynced = self._is_unsynced, True
        finally:
            self._file_lock.release()
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
                self._until_written(partial(self._file.append, rows))
                size_bytes = sum(len(row.data) for row in rows)
                self._tell(self._progress.note_commit, rows[-1].position, size_bytes)
            if rows or _Unsynced.WRITTEN in entries:
                sync_at_s = min(sync_at_s, time.monotonic() + _SYNC_S)
            if is_last or time.monotonic() >= sync_at_s:
                self._until_written(self._sync)
                sync_at_s = math.inf
            for entry in entries:
                if isinstance(entry, _Checkpoint):
                    removable, freed_bytes = self._until_written(
                        partial(self._forget_before, entry)
                    )
                    self._tell(self._progress.note_freed, freed_bytes)
            if is_last:
                return
            if removable:
                is_more = self._until_written(partial(self._file.remove_some, removable))
                removable = removable if is_more else 0

    def _sync(self) -> None:
        # First, and with the file: a later write of the event loop asks for another sync.
        self._is_unsynced = False
        self._file.sync()

    def _forget_before(self, checkpoint: _Checkpoint) -> tuple[int, int]:
        """Remember a checkpoint; return the position up to which changes may go, and their size."""
        aside_path(self._path).unlink(missing_ok=True)
        size_bytes = self._file.size_bytes
        removable = self._file.add_checkpoint(
            checkpoint.step,
            checkpoint.position,
            kept_steps=checkpoint.kept_steps,
            most_bytes=self._limit_bytes // 2,
        )
        return removable, size_bytes - self._file.size_bytes

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
                with self._file_lock:
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
