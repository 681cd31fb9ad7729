"""The redo log of a run: takes the changes of the ledger, and replays them at a start."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vcpo.service.lifecycle import StartError
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.changes import Change, InconsistentChangeError, LogRoom
from vcpo_learner.ledger.contents import LedgerContents
from vcpo_learner.redo_log.file import (
    DamagedLogError,
    LogFile,
    Row,
    file_path,
    is_damage,
    replace_damaged,
)
from vcpo_learner.redo_log.log_end import (
    LogEnd,
    UnreadableChangeError,
    change_from_bytes,
    change_to_bytes,
)
from vcpo_learner.redo_log.progress import LogProgress
from vcpo_learner.redo_log.redo import LoggedStep, RecordedStep, Redo
from vcpo_learner.redo_log.writer import CompleteCheckpoint, LogWriter

RETRY_S: Final = 5.0
"""Time between two attempts on a disk that is full or fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Damage:
    """Damage of the file, found at the start."""

    cause: str
    aside: Path | None
    """Path to which the damaged file was moved; None if it is the one that goes on."""
    loss: str = "nothing of it can be read"
    """The loss by the damage, as clauses."""

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
    """The redo log of one run; a `ChangeLog`. Owner: the event loop.

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
        self._progress = LogProgress(self._path, limit_bytes=limit_bytes, retry_s=retry_s)
        self._versions: Mapping[int, ledger_pb2.VersionPublished] = {}
        """Versions that earlier processes announced."""
        self.num_different = 0
        """Versions of this process that differ from those."""
        self.lost_changes = 0
        """Changes that were committed and that `redo` has not found; a lower bound if its event
        says so."""
        self._damage: _Damage | None = None
        """Damage that was found and is not reported yet."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._position = self._progress.committed = self._read_count(
                lambda file: file.last_position
            )
            self._progress.size_bytes = self._read_count(lambda file: file.size_bytes)
            self._read_count(lambda file: len(file.checkpoints))
        except (sqlite3.Error, OSError) as error:
            raise StartError(
                f"{self._path}: the redo log cannot be opened ({error}); make the folder writable,"
                " on a disk with room and with file locks"
            ) from error
        self._writer = LogWriter(
            self._file, self._progress, limit_bytes=limit_bytes, retry_s=retry_s, clock=clock
        )

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
        return not self.checkpoint_steps and self._read_count(lambda file: file.first_position) <= 1

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
        last, held = after, self._read_count(lambda file: file.last_position)
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
            step=contents.version,
            recorded_step=recorded_step,
        )
        self._judge(end, cause)
        self._position = self._progress.committed = last
        self._versions = redo.versions
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
        if isinstance(change, ledger_pb2.VersionPublished):
            self._compare(change)
        self._position += 1
        self._writer.write(Row(position=self._position, data=data))

    async def wait_until_kept(self) -> None:
        """Wait until every change so far outlives this process.

        Raises: what ended the thread: damage, or a bug. A disk that fails is waited for.
        """
        await self._progress.wait_for(self._position)

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
        self._writer.add_checkpoint(
            CompleteCheckpoint(step=step, position=position, kept_steps=kept_steps)
        )

    def take_events(self) -> list[tuple[str, str]]:
        """Return kind and message of each event since the last call."""
        events, self._progress.events = self._progress.events, []
        if (damage := self._damage) is not None:
            self._damage = None
            events.insert(0, ("LogDamaged", damage.message))
        return events

    def close(self) -> None:
        """Write what waits, unless the disk fails, and close the file; waits for that."""
        self._writer.close()

    def _open(self) -> LogFile:
        try:
            return LogFile(self._path)
        except DamagedLogError as error:
            aside = replace_damaged(self._path, None)
            self._damage = _Damage(cause=str(error), aside=aside)
            return LogFile(self._path)

    def _read_count(self, count: Callable[[LogFile], int]) -> int:
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
            self._file = self._writer.file = LogFile(self._path)
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
            with self._writer.file_lock:
                row = self._file.read_one(position)
            yield change_from_bytes(row.data)

    def _compare(self, published: ledger_pb2.VersionPublished) -> None:
        """Report the first redone version that differs from the one that was announced before.

        Another number of ranks adds up in another order, and other shards have other checksums.
        """
        known = self._versions.get(published.policy_version, published)
        shape, known_shape = ((each.num_ranks, each.num_shards) for each in (published, known))
        if known.checksum == published.checksum or shape != known_shape:
            return
        self.num_different += 1
        if self.num_different == 1:
            message = (
                f"version {published.policy_version} has other parameters than before the restart"
                f" (checksum {published.checksum:016x}, was {known.checksum:016x}): this hardware"
                " does not repeat its sums bit for bit; the run goes on with the redone"
                " parameters, and tokens sampled by the earlier ones keep their log-probabilities"
            )
            self._progress.events.append(("RedoDiffers", message))
