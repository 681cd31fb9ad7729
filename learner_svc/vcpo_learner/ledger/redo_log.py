"""The redo log of a run: the ledger's changes in files, each change behind its size and checksum.

```
redo-log/0000000000000001-00000000.log   first change, and step at which the file was begun
         0000000000004711-00000050.log   begun at the snapshot of the checkpoint of step 50
         spec.json                       what a resume must share
frame    size and its complement, 4 bytes each | xxh3 of the change, 8 bytes | LedgerChange
```

A thread writes, and a change outlives the process once it is written; a sync every second brings it
to the disk, before the machine may fail. A learner that is killed leaves at most a torn last
change, which nobody was answered for. What lies behind damage is set aside and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, cast

import xxhash
from google.protobuf.message import DecodeError

from vcpo.service.lifecycle import StartError
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.changes import Change, InconsistentChangeError

_HEAD: Final = struct.Struct("<IIQ")
_ALL_BITS: Final = 0xFFFFFFFF
_FIELDS: Final = {
    field.message_type: field.name
    for field in ledger_pb2.LedgerChange.DESCRIPTOR.oneofs_by_name["change"].fields
}
_SYNC_S: Final = 1.0
"""Time between two syncs, and so what a machine that fails may lose."""
_RETRY_S: Final = 5.0
"""Time between two attempts on a disk that is full or fails."""
_CHECKPOINT_BYTES: Final = 1 << 30
"""Size of the changes since a snapshot from which on a checkpoint is due: a start has all of them
in memory."""
DISK_FULL: Final = "DiskFull"
"""Kind of the event that the log cannot be written."""


class _File(NamedTuple):
    """A file of the log."""

    first: int
    """Number of its first change."""
    step: int
    """Optimizer steps when it was begun."""
    path: Path


class _DamagedHeadError(Exception):
    """The size of a change was damaged, so what follows it in the file cannot be found."""


class _ClosedError(Exception):
    """The log was closed while its disk failed."""


class RedoLog:
    """The redo log of one run; a `ChangeLog`. Owner: the event loop; its thread writes the files.

    A learner that resumes calls `redo` before the first change is appended.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        checkpoint_bytes: int = _CHECKPOINT_BYTES,
        retry_s: float = _RETRY_S,
    ) -> None:
        """Open the folder of a run directory, and create it if there is none."""
        self.path = run_dir / "redo-log"
        self.position = 0
        """Number of the newest change; 0 before the first."""
        self.is_unwritable = False
        """Whether the disk is full or fails: changes wait in memory, and nothing is answered."""
        self.lost_changes = 0
        """Changes that were written and that `redo` did not find; may be too few."""
        self._checkpoint_bytes = checkpoint_bytes
        self._retry_s = retry_s
        self._step = self._new_bytes = self._committed = 0
        self._events: list[tuple[str, str]] = []
        self._failure: Exception | None = None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._queue: SimpleQueue[bytes | int | None] = SimpleQueue()
        """For the thread: a change, the step of a file to begin, or the end."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._files = _files(self.path)
        except OSError as error:
            raise self._cannot("opened", error) from error

    @property
    def is_used(self) -> bool:
        return bool(self._files)

    @property
    def first_step(self) -> int:
        return self._files[0].step if self._files and self._files[0].first > 1 else 0

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """The parts of the spec that a resume must share, as stored; None if none can be read."""
        try:
            return cast("Mapping[str, Any]", json.loads((self.path / "spec.json").read_bytes()))
        except (OSError, ValueError):
            return None

    def set_spec(self, spec: Mapping[str, Any]) -> None:
        """Store the parts of the spec that a resume must share."""
        path = self.path / "spec.json"
        try:
            path.with_suffix(".partial").write_text(json.dumps(spec))
            path.with_suffix(".partial").replace(path)
        except OSError as error:
            raise self._cannot("written", error) from error

    @property
    def is_checkpoint_due(self) -> bool:
        return self._new_bytes >= self._checkpoint_bytes

    def append(self, change: Change) -> None:
        """Take a change; it is written in the background, after all earlier ones."""
        data = change_to_bytes(change)  # first: after an error there must be no gap
        self.position += 1
        self._new_bytes += len(data)
        self._put(data)

    def cut(self, step: int) -> int:
        """Begin another file, at the snapshot of a step; return the newest change's number."""
        self._new_bytes = 0
        if self._thread is not None:
            self._put(step)
        self._step = step
        return self.position

    def remove_before(self, step: int) -> None:
        """Remove the files that no checkpoint from a step on needs, and what was set aside."""
        files = _files(self.path)
        needed = next((each.first for each in files if each.step >= step), 0)
        for each in files:
            if each.first < needed:
                each.path.unlink(missing_ok=True)
        for path in self.path.glob("damaged-*"):
            path.unlink(missing_ok=True)

    async def wait_until_kept(self) -> None:
        """Wait until every change so far outlives this process.

        Raises: what ended the thread. A disk that fails is waited for.
        """
        self.check()
        if self._committed < self.position:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self.position, written))
            await written

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def redo(self, apply: Callable[[Change], object], *, after: int, step: int) -> tuple[str, int]:
        """Apply the changes after one, up to the first that is missing or damaged; go on from it.

        What lies behind it is set aside.

        after, step: newest change that the checkpoint has, and its step.

        Returns what is missing, as a clause, and how many changes at least; "" and 0 for nothing.
        """
        self.position, cause = after, ""
        for each, following in zip_longest(self._files, [one.first for one in self._files[1:]]):
            if following is not None and following <= after + 1:
                continue  # the checkpoint has all of its changes
            if each.first > self.position + 1:
                cause = f"{each.path}: the changes before it, from {self.position + 1}, are missing"
            else:
                cause = self._redo_file(each, apply)
            # A learner before this one may have gone on behind the damage.
            if cause and (following is None or following > self.position + 1):
                break
            cause = ""
        end = self._end()
        if not cause and end < after:
            cause = f"{self.path}: ends at change {end}, and the checkpoint holds change {after}"
        self._committed, self._step = self.position, step
        if not cause:
            return "", 0
        for each in self._files:
            if each.first > self.position:
                each.path.rename(each.path.with_name(f"damaged-{each.path.name}"))
        used = f"the {self.position - after} changes before it are used"
        return f"{cause}; {used}", max(0, end - self.position)

    def report_loss(self, what: str, num_changes: int) -> None:
        """Report changes that were written and are not there; num_changes: at least so many."""
        self.lost_changes = num_changes
        lost = f"{num_changes} later ones, which were committed, are lost"
        self._events.append(("LogDamaged", f"{what}, and at least {lost}"))

    def take_events(self) -> list[tuple[str, str]]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Write what waits, unless the disk fails; waits for that."""
        self._queue.put(None)
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _redo_file(self, file: _File, apply: Callable[[Change], object]) -> str:
        """Apply the changes of a file that are new; return why it ends early, or nothing."""
        number = file.first - 1
        try:
            for data in _frames(file.path):
                number += 1
                if number <= self.position:
                    continue
                if data is None:
                    return f"{file.path}: change {number} differs from its checksum"
                apply(change_from_bytes(data))
                self.position = number
        except _DamagedHeadError:
            return f"{file.path}: the size of change {number + 1} is damaged"
        except OSError as error:
            return f"{file.path}: {error}"
        except (DecodeError, InconsistentChangeError) as error:
            return f"{file.path}: change {number} cannot be redone ({error})"
        return ""

    def _end(self) -> int:
        """Return the number of the newest change that was written, as far as the files tell."""
        if not self._files:
            return 0
        number = self._files[-1].first - 1
        try:
            for _ in _frames(self._files[-1].path):
                number += 1
        except _DamagedHeadError:
            number += 1
        except OSError:
            pass
        return number

    def _cannot(self, what: str, error: OSError) -> StartError:
        return StartError(
            f"{self.path}: the redo log cannot be {what} ({error}); make the folder writable, on a"
            " disk with room"
        )

    def _put(self, entry: bytes | int) -> None:
        if self._thread is None:
            loop, number = asyncio.get_running_loop(), self._committed
            self._thread = threading.Thread(
                target=self._write, args=(loop, number), name="redo-log", daemon=True
            )
            self._queue.put(self._step)
            self._thread.start()
        self._queue.put(entry)

    def _write(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Run the thread. number: of the last change before it."""
        tell = loop.call_soon_threadsafe
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            try:
                self._write_until_closed(tell, number)
            except _ClosedError:
                return
            except Exception as error:  # whoever waits for a change must not wait for ever
                tell(self._note_failure, error)
                raise

    def _write_until_closed(self, tell: Callable[..., object], number: int) -> None:
        """Write what is in the queue, all that waits at once, and sync a second later."""
        file, is_open, sync_at_s = -1, True, float("inf")
        while is_open:
            wait_s = None if sync_at_s == float("inf") else max(0.0, sync_at_s - time.monotonic())
            entries = _take_all(self._queue, wait_s)
            is_open = None not in entries
            before = number
            for entry in entries:
                if isinstance(entry, int):
                    path = self.path / f"{number + 1:016d}-{entry:08d}.log"
                    file = self._until_done(tell, partial(_begin, path, file))
                elif entry is not None:
                    self._until_done(tell, partial(_write_frame, file, entry))
                    number += 1
            if number > before:
                sync_at_s = min(sync_at_s, time.monotonic() + _SYNC_S)
                tell(self._note_commit, number)
            if file >= 0 and (not is_open or time.monotonic() >= sync_at_s):
                self._until_done(tell, partial(os.fsync, file))
                sync_at_s = float("inf")
        if file >= 0:
            os.close(file)

    def _until_done(self, tell: Callable[..., object], do: Callable[[], Any]) -> Any:
        """Call `do` until the disk lets it succeed."""
        while True:
            try:
                return do()
            except FileNotFoundError:
                raise
            except OSError as error:
                tell(self._note_error, str(error))
                if self._closing.wait(self._retry_s):
                    raise _ClosedError from error

    def _note_error(self, error: str) -> None:
        if not self.is_unwritable:
            text = (
                f"{self.path}: {error}; nothing is lost: no work is granted and no submission is"
                f" answered until it is written; the next attempts follow every {self._retry_s:g} s"
            )
            self._events.append((DISK_FULL, text))
        self.is_unwritable = True

    def _note_commit(self, number: int) -> None:
        if self.is_unwritable:
            self.is_unwritable = False
            self._events.append(("DiskHasRoom", f"{self.path} is written again"))
        self._committed = number
        while self._waiting and self._waiting[0][0] <= number:
            _, written = self._waiting.popleft()
            if not written.done():
                written.set_result(None)

    def _note_failure(self, error: Exception) -> None:
        self._failure = error
        for _, written in self._waiting:
            if not written.done():
                written.set_exception(error)
        self._waiting.clear()


def change_to_bytes(change: Change) -> bytes:
    """Return the bytes of a `LedgerChange` that holds a change."""
    fields: dict[str, Any] = {_FIELDS[change.DESCRIPTOR]: change}
    return ledger_pb2.LedgerChange(**fields).SerializeToString()


def change_from_bytes(data: bytes) -> Change:
    """Read what `change_to_bytes` returned.

    Raises:
        DecodeError: if it is something else.
    """
    message = ledger_pb2.LedgerChange.FromString(data)
    if (kind := message.WhichOneof("change")) is None:
        raise DecodeError("it holds no change that this version of vcpo knows")
    return cast("Change", getattr(message, kind))


def _files(folder: Path) -> list[_File]:
    names = (path.stem.partition("-") for path in folder.glob("*-*.log"))
    return sorted(
        _File(int(first), int(step), folder / f"{first}-{step}.log")
        for first, _, step in names
        if first.isdecimal() and step.isdecimal()
    )


def _frames(path: Path) -> Iterator[bytes | None]:
    """Yield the changes of a file, None for a damaged one, up to the last that is not torn."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left >= _HEAD.size:
            size, complement, checksum = _HEAD.unpack(file.read(_HEAD.size))
            if size ^ complement != _ALL_BITS:
                raise _DamagedHeadError
            left -= _HEAD.size + size
            if left >= 0:
                data = file.read(size)
                yield data if xxhash.xxh3_64_intdigest(data) == checksum else None


def _begin(path: Path, before: int) -> int:
    """Create a file, in the place of one without a whole change; return its descriptor.

    before: descriptor of the file before it, which is closed; negative for none.
    """
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        if before >= 0:
            os.fsync(before)
    except OSError:
        os.close(file)
        raise
    if before >= 0:
        os.close(before)
    return file


def _write_frame(file: int, data: bytes) -> None:
    """Append a change, all of it or nothing."""
    head = _HEAD.pack(len(data), len(data) ^ _ALL_BITS, xxhash.xxh3_64_intdigest(data))
    end = os.fstat(file).st_size
    written = 0
    try:
        written = os.writev(file, [head, data])
    finally:
        if written < len(head) + len(data):
            os.ftruncate(file, end)
    if written < len(head) + len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _take_all(queue: SimpleQueue[Any], wait_s: float | None) -> list[Any]:
    """Return all entries that are there; wait for the first one."""
    taken: list[Any] = []
    with contextlib.suppress(Empty):
        taken.append(queue.get(timeout=wait_s))
        while True:
            taken.append(queue.get_nowait())
    return taken
