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
from vcpo.wire.v1 import ledger_pb2, work_pb2

Change = (
    ledger_pb2.LeaseGranted
    | work_pb2.SubmitRequest
    | ledger_pb2.LeaseEnded
    | ledger_pb2.GroupsDropped
    | ledger_pb2.Evaluated
    | ledger_pb2.LagLimit
    | ledger_pb2.LearnerRestarted
)
_HEAD: Final = struct.Struct("<IIQ")
_NEW: Final = os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY
_ALL_BITS: Final = 0xFFFFFFFF
_FIELDS: Final = {
    field.message_type: field.name
    for field in ledger_pb2.LedgerChange.DESCRIPTOR.oneofs_by_name["change"].fields
}
_SYNC_S: Final = 1.0
"""Time between two syncs, and so what a machine that fails may lose."""
_UNENDING: Final = "has a damaged size, so what follows it cannot be found"


class InconsistentChangeError(ValueError):
    """A change does not fit the ledger that it is applied to; the message says why."""


class _File(NamedTuple):
    first: int
    """Number of its first change."""
    step: int
    """Optimizer steps when it was begun."""
    path: Path


class RedoLog:
    """The redo log of one run. Owner: the event loop; its thread writes the files.

    A learner that resumes calls `redo` before the first change is appended.
    """

    retry_s = 5.0
    """Time between two attempts on a disk that is full or fails."""
    checkpoint_bytes = 1 << 30
    """Size of the changes since a snapshot from which on a checkpoint is due: a start has all of
    them in memory."""

    def __init__(self, run_dir: Path, event: Callable[[str, str], object]) -> None:
        """Open the folder of a run directory, and create it if there is none.

        event: tells that the disk is full, and that it has room again.
        """
        self.path = run_dir / "redo-log"
        self.position = 0
        """Number of the newest change; 0 before the first."""
        self.is_unwritable = False
        """Whether the disk is full or fails: changes wait in memory, and nothing is answered."""
        self._event = event
        self._step = self._new_bytes = self._committed = 0
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
    def is_checkpoint_due(self) -> bool:
        return self._new_bytes >= self.checkpoint_bytes

    @property
    def spec(self) -> Mapping[str, Any] | None:
        """The parts of the spec that a resume must share, as stored; None if none can be read."""
        try:
            return cast("Mapping[str, Any]", json.loads((self.path / "spec.json").read_bytes()))
        except (OSError, ValueError):
            return None

    def set_spec(self, spec: Mapping[str, Any]) -> None:
        path = self.path / "spec.json"
        try:
            path.with_suffix(".partial").write_text(json.dumps(spec))
            path.with_suffix(".partial").replace(path)
        except OSError as error:
            raise self._cannot("written", error) from error

    def append(self, change: Change) -> None:
        """Take a change; it is written in the background, after all earlier ones."""
        data = change_to_bytes(change)  # first: after an error there must be no gap
        self.position += 1
        self._new_bytes += len(data)
        if self._thread is None:
            self._tell = asyncio.get_running_loop().call_soon_threadsafe
            run = partial(self._write, self._committed)
            self._thread = threading.Thread(target=run, name="redo-log", daemon=True)
            self._queue.put(self._step)
            self._thread.start()
        self._queue.put(data)

    def cut(self, step: int) -> int:
        """Begin another file, at the snapshot of a step; return the newest change's number."""
        self._new_bytes = 0
        if self._thread is not None:
            self._queue.put(step)
        self._step = step
        return self.position

    def remove_before(self, step: int) -> None:
        """Remove the files that no checkpoint from a step on needs, and what was set aside."""
        files = _files(self.path)
        needed = next((each.first for each in files if each.step >= step), 0)
        unneeded = (each.path for each in files if each.first < needed)
        for path in (*unneeded, *self.path.glob("damaged-*")):
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

    def close(self) -> None:
        """Write what waits, unless the disk fails; waits for that."""
        self._queue.put(None)
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

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

    def _redo_file(self, file: _File, apply: Callable[[Change], object]) -> str:
        """Apply the changes of a file that are new; return why it ends early, or nothing."""
        number = file.first - 1
        try:
            for data in _frames(file.path):
                number += 1
                if isinstance(data, str) and (number > self.position or data is _UNENDING):
                    return f"{file.path}: change {number} {data}"
                if number > self.position:
                    apply(change_from_bytes(cast("bytes", data)))
                    self.position = number
        except OSError as error:
            return f"{file.path}: {error}"
        except (DecodeError, InconsistentChangeError) as error:
            return f"{file.path}: change {number} cannot be redone ({error})"
        return ""

    def _end(self) -> int:
        """Return the number of the newest change that was written, as far as the files tell."""
        number = 0
        for newest in self._files[-1:]:
            number = newest.first - 1
            with contextlib.suppress(OSError):
                for _ in _frames(newest.path):
                    number += 1
        return number

    def _cannot(self, what: str, error: OSError) -> StartError:
        return StartError(
            f"{self.path}: the redo log cannot be {what} ({error}); make the folder writable, on a"
            " disk with room"
        )

    def _write(self, number: int) -> None:
        """Run the thread. number: of the last change before it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            try:
                self._write_until_closed(number)
            except Exception as error:  # whoever waits for a change must not wait for ever
                self._tell(self._note_failure, error)
                if not self._closing.is_set():
                    raise

    def _write_until_closed(self, number: int) -> None:
        """Write what is in the queue, all that waits at once, and sync every second."""
        do = self._until_done
        file, is_open, sync_at_s = -1, True, time.monotonic() + _SYNC_S
        while is_open:
            entries = _take_all(self._queue, max(0.0, sync_at_s - time.monotonic()))
            is_open = None not in entries
            before = number
            for entry in entries:
                if isinstance(entry, int):
                    if file >= 0:
                        do(os.fsync, file)
                        os.close(file)
                    # In the place of a file without a whole change, if there is one.
                    file = do(
                        os.open, self.path / f"{number + 1:016d}-{entry:08d}.log", _NEW, 0o600
                    )
                    do(_sync_folder, self.path)
                elif entry is not None:
                    do(_write_frame, file, entry)
                    number += 1
            if number > before:
                self._tell(self._note_commit, number)
            if not is_open or time.monotonic() >= sync_at_s:
                do(os.fsync, file)
                sync_at_s = time.monotonic() + _SYNC_S
                self._tell(self._note_commit, number)  # the disk works, if it had failed
        os.close(file)

    def _until_done(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Call `do` until the disk lets it succeed, or the log is closed."""
        while True:
            try:
                return do(*arguments)
            except FileNotFoundError:
                raise
            except OSError as error:
                self._tell(self._note_error, str(error))
                if self._closing.wait(self.retry_s):
                    raise

    def _note_error(self, error: str) -> None:
        was_unwritable, self.is_unwritable = self.is_unwritable, True
        if not was_unwritable:
            text = (
                f"{self.path}: {error}; nothing is lost: no work is granted and no submission is"
                f" answered until it is written; the next attempts follow every {self.retry_s:g} s"
            )
            self._event("DiskFull", text)

    def _note_commit(self, number: int) -> None:
        self._committed = number
        while self._waiting and self._waiting[0][0] <= number:
            _, written = self._waiting.popleft()
            if not written.done():
                written.set_result(None)
        if self.is_unwritable:
            self.is_unwritable = False
            self._event("DiskHasRoom", f"{self.path} is written again")

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


def _frames(path: Path) -> Iterator[bytes | str]:
    """Yield the changes of a file, or what is wrong with one, up to the last that is not torn."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left >= _HEAD.size:
            size, complement, checksum = _HEAD.unpack(file.read(_HEAD.size))
            if size ^ complement != _ALL_BITS:
                yield _UNENDING
                return
            left -= _HEAD.size + size
            if left >= 0:
                data = file.read(size)
                is_whole = xxhash.xxh3_64_intdigest(data) == checksum
                yield data if is_whole else "differs from its checksum"


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_frame(file: int, data: bytes) -> None:
    """Append a change, all of it or nothing."""
    head = _HEAD.pack(len(data), len(data) ^ _ALL_BITS, xxhash.xxh3_64_intdigest(data))
    end = os.fstat(file).st_size
    if os.writev(file, [head, data]) < len(head) + len(data):
        os.ftruncate(file, end)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _take_all(queue: SimpleQueue[Any], wait_s: float | None) -> list[Any]:
    """Return all entries that are there; wait for the first one."""
    taken: list[Any] = []
    with contextlib.suppress(Empty):
        taken.append(queue.get(timeout=wait_s))
        while True:
            taken.append(queue.get_nowait())
    return taken
