"""The file of the redo log: a table of changes in SQLite, with a write-ahead log of its own.

```
change      position   1, 2, 3 ... without a gap       checkpoint   step
            checksum   xxh3 of position and data                    position   of its last change
            data       the change, `redo_log.encoding`, if it is small
            segment, offset, size   where it is, if it is large: `redo_log.segments`
run         spec       what a resume must share, as JSON
```

The mark beside it (`redo_log.end_mark`) says at which change the file must end.

A commit is in the file before it returns, so a kill of the process loses none; `sync` brings it to
the disk, before the machine may fail. SQLite cuts a commit that was torn; the checksums find what a
disk changed later, and large data that a failed machine had not written yet. Changes that no kept
checkpoint needs are removed with their segments, and their pages are used again: the file stays as
large as it ever had to be.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import xxhash

from vcpo_learner.redo_log.end_mark import EndMark
from vcpo_learner.redo_log.segments import Place, Segments

_NAME: Final = "redo-log.sqlite"
_SEGMENTS_NAME: Final = "redo-log"
_FORMAT: Final = 3
_LARGE_BYTES: Final = 1024
"""A change from this size on lies in a segment; a smaller one shares a page with others."""
_WAL_COMMITS: Final = 300
"""SQLite copies its write-ahead log into the tables after so many commits, of 2 to 4 pages each."""
_ROWS_AT_ONCE: Final = 64
"""Changes removed or copied in one commit, so that no submission waits long for it."""
_NO_LIMIT: Final = 1 << 62
_SIGN_BIT: Final = 1 << 63
_SELECT: Final = "SELECT position, checksum, data, segment, offset, size FROM change"
_INSERT: Final = (
    "INSERT INTO change (position, checksum, data, segment, offset, size) VALUES (?, ?, ?, ?, ?, ?)"
)


class DamagedLogError(ValueError):
    """The log cannot be read to its end; the message says where and why."""

    def __init__(self, message: str, *, last_position: int) -> None:
        self.last_position = last_position
        """Position of the last change that can be read."""
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One change in the file."""

    position: int
    data: bytes


class LogFile:
    """The file of one run. One thread at a time may use it.

    Raises:
        sqlite3.Error, OSError: from every method, if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and create it if there is none.

        Raises:
            DamagedLogError: if it is no redo log of this version.
        """
        self.path = path
        self._segments = Segments(path.with_name(_SEGMENTS_NAME))
        self._mark = EndMark(path.parent)
        self._wal_commits = 0
        # Every statement outside of a transaction commits; another thread than this one may write.
        self._tables = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._tables.close()
            is_readable_only = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY
            # SQLite writes no file whose header names a later format.
            if not is_damage(error) and not (is_readable_only and os.access(path, os.W_OK)):
                raise
            raise DamagedLogError(f"{path}: {error}", last_position=0) from error

    @property
    def spec(self) -> str:
        """What `set_spec` stored; empty before."""
        found = self._tables.execute("SELECT spec FROM run").fetchone()
        return "" if found is None else str(found[0])

    def set_spec(self, spec: str) -> None:
        """Store the parts of the run's spec that a resume must share."""
        with self._commit():
            self._tables.execute("DELETE FROM run")
            self._tables.execute("INSERT INTO run (spec) VALUES (?)", (spec,))

    @property
    def marked_position(self) -> int | None:
        """Where the file must end, as an earlier process left it; None if nothing says so."""
        return self._mark.position

    def append(self, rows: Sequence[Row]) -> None:
        """Write changes, all or none, and move the mark behind them."""
        self._mark.begin(rows[0].position - 1)
        self.copy(rows)
        self._mark.move(rows[-1].position)

    def copy(self, rows: Sequence[Row]) -> None:
        """Write changes, all or none, which another file holds: the mark is still that file's."""
        large = [row for row in rows if len(row.data) >= _LARGE_BYTES]
        places = self._segments.write([row.data for row in large])
        place_of = {row.position: place for row, place in zip(large, places, strict=True)}
        records = [_record(row, place_of.get(row.position)) for row in rows]
        if len(records) == 1:  # a commit in one statement instead of three
            self._tables.execute(_INSERT, records[0])
            self._wal_commits += 1
        else:
            with self._commit():
                self._tables.executemany(_INSERT, records)
        self._segments.keep()

    def read(self, after: int) -> Iterator[Row]:
        """Yield the changes after a position, in order.

        Raises:
            DamagedLogError: at the first change that is missing or differs from what was written.
        """
        last = after
        try:
            found = self._tables.execute(
                f"{_SELECT} WHERE position > ? ORDER BY position", (after,)
            )
            for record in found:
                if record[0] != last + 1:
                    raise DamagedLogError(
                        f"{self.path}: change {last + 1} is missing", last_position=last
                    )
                yield self._row(record)
                last += 1
        except (sqlite3.DatabaseError, OSError) as error:
            raise DamagedLogError(f"{self.path}: {error}", last_position=last) from error

    def read_one(self, position: int) -> Row:
        """Return the change at a position.

        Raises:
            DamagedLogError: if it is missing or differs from what was written.
        """
        try:
            record = self._tables.execute(f"{_SELECT} WHERE position = ?", (position,)).fetchone()
            if record is None:
                raise DamagedLogError(
                    f"{self.path}: change {position} is missing", last_position=position - 1
                )
            return self._row(record)
        except (sqlite3.DatabaseError, OSError) as error:
            message = f"{self.path}: {error}"
            raise DamagedLogError(message, last_position=position - 1) from error

    @property
    def first_position(self) -> int:
        """Position of the oldest change; 0 if there is none."""
        return self._number("SELECT min(position) FROM change")

    @property
    def last_position(self) -> int:
        """Position of the newest change or checkpoint; 0 if there is none."""
        return self._number("SELECT max(position) FROM (SELECT position FROM change UNION ALL"
                            " SELECT position FROM checkpoint)")  # fmt: skip

    @property
    def size_bytes(self) -> int:
        """Size of the changes that a kept checkpoint needs; of all, if there is none."""
        return self._number(
            "SELECT sum(length(data) + ifnull(size, 0)) FROM change WHERE position >"
            " (SELECT ifnull(min(position), 0) FROM checkpoint)"
        )

    def add_checkpoint(
        self, step: int, position: int, *, kept_steps: Collection[int], most_bytes: int = _NO_LIMIT
    ) -> int:
        """Remember a checkpoint; forget those that are not kept, and those of later steps.

        most_bytes: size of the changes above which the oldest are forgotten too, but for this one.

        Returns the position up to which no kept checkpoint needs a change.
        """
        execute = self._tables.execute
        with self._commit():
            execute("DELETE FROM checkpoint WHERE step >= ?", (step,))
            execute("INSERT INTO checkpoint (step, position) VALUES (?, ?)", (step, position))
            known = [row[0] for row in execute("SELECT step FROM checkpoint").fetchall()]
            forgotten = [(each,) for each in known if each not in kept_steps]
            self._tables.executemany("DELETE FROM checkpoint WHERE step = ?", forgotten)
            for oldest, _ in self.checkpoints[:-1]:
                if self.size_bytes > most_bytes:
                    execute("DELETE FROM checkpoint WHERE step = ?", (oldest,))
        return self._number("SELECT min(position) FROM checkpoint")

    @property
    def checkpoints(self) -> tuple[tuple[int, int], ...]:
        """Step of each checkpoint that is remembered and position of its last change, in order."""
        found = self._tables.execute("SELECT step, position FROM checkpoint ORDER BY step")
        try:
            return tuple((int(step), int(position)) for step, position in found)
        except (TypeError, ValueError):  # SQLite does not see a flipped bit in a number
            damage = sqlite3.DatabaseError("a checkpoint has no number")
            damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damage from None

    def copy_checkpoints(self, checkpoints: Sequence[tuple[int, int]]) -> None:
        """Remember what `checkpoints` of another file returned; for a file that has none."""
        with self._commit():
            self._tables.executemany(
                "INSERT INTO checkpoint (step, position) VALUES (?, ?)", checkpoints
            )

    def remove_some(self, up_to: int) -> bool:
        """Remove some of the oldest changes up to a position; return whether there were any."""
        removed = self._tables.execute(
            "DELETE FROM change WHERE position IN (SELECT position FROM change WHERE position <= ?"
            " ORDER BY position LIMIT ?)",
            (up_to, _ROWS_AT_ONCE),
        )
        oldest = self._tables.execute(
            "SELECT segment FROM change WHERE segment IS NOT NULL ORDER BY position LIMIT 1"
        ).fetchone()
        self._segments.remove_before(None if oldest is None else oldest[0])
        self._wal_commits += 1
        return removed.rowcount > 0

    @property
    def is_sync_due(self) -> bool:
        """Whether a file of large changes is full, and goes on growing until the next sync."""
        return self._segments.is_full

    def sync(self) -> None:
        """Bring all commits to the disk.

        Raises:
            OSError: if the disk fails.
        """
        self._segments.sync()  # first: the table must not name data that a failed machine lost
        with self.path.with_name(f"{self.path.name}-wal").open("rb") as written:
            os.fsync(written.fileno())
        if self._wal_commits >= _WAL_COMMITS:
            with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the next sync tries
                self._tables.execute("PRAGMA wal_checkpoint(PASSIVE)")  # with syncs of its own
                self._wal_commits = 0

    def close(self) -> None:
        """Close the file."""
        self._segments.close()
        self._mark.close()
        self._tables.close()

    def _prepare(self) -> None:
        """Set up the connection, and the tables of a new file."""
        execute = self._tables.execute
        # One process has the file, so SQLite needs no shared memory beside it.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA wal_autocheckpoint = 0")  # `sync` does it: it waits for the disk
        execute("BEGIN IMMEDIATE")
        execute(
            "CREATE TABLE IF NOT EXISTS change"
            " (position INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, data BLOB NOT NULL,"
            " segment INTEGER, offset INTEGER, size INTEGER)"
        )
        execute(
            "CREATE TABLE IF NOT EXISTS checkpoint"
            " (step INTEGER PRIMARY KEY, position INTEGER NOT NULL)"
        )
        execute("CREATE TABLE IF NOT EXISTS run (spec TEXT NOT NULL)")
        (found,) = execute("PRAGMA user_version").fetchone()
        if found not in (0, _FORMAT):
            raise DamagedLogError(
                f"{self.path}: has format {found}, this version of vcpo reads {_FORMAT}",
                last_position=0,
            )
        execute(f"PRAGMA user_version = {_FORMAT}")
        execute("COMMIT")

    @contextlib.contextmanager
    def _commit(self) -> Iterator[None]:
        """Commit what the block writes, all or none."""
        self._tables.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._tables.execute("COMMIT")
            self._wal_commits += 1
        except sqlite3.Error:
            if self._tables.in_transaction:  # SQLite ends it itself after some errors
                self._tables.execute("ROLLBACK")
            raise

    def _row(self, record: tuple[Any, ...]) -> Row:
        """Return the change of a row of the table.

        Raises:
            DamagedLogError: if it differs from what was written.
        """
        position, checksum, small, segment, offset, size = record
        place = None if segment is None else Place(segment, offset, size)
        data = small if place is None else self._segments.read(place)
        if not isinstance(data, bytes) or checksum != _checksum(position, data):
            raise DamagedLogError(
                f"{self.path}: change {position} differs from its checksum",
                last_position=position - 1,
            )
        return Row(position=position, data=data)

    def _number(self, query: str) -> int:
        (found,) = self._tables.execute(query).fetchone()
        return int(found or 0)


def file_path(run_dir: Path) -> Path:
    """Return the path of a run's redo log; finish a replacement that was interrupted."""
    path = run_dir / _NAME
    fresh = _fresh_path(path)
    if fresh.exists():
        if path.exists():
            fresh.unlink()
        else:  # the damaged file has its new name already
            fresh.rename(path)
    return path


def aside_path(path: Path) -> Path:
    """Return where a damaged log is kept."""
    return path.with_name(f"damaged-{path.name}")


def replace_damaged(path: Path, file: LogFile | None, *, after: int = 0, last: int = 0) -> Path:
    """Replace a damaged log by one with the changes that can be read; return where the old one is.

    file: the open log, which is closed; None if it cannot be opened.
    after, last: the readable changes are those after one position and up to the other. Those before
        them stay too, if an older checkpoint needs them: the one in use may be found damaged later.
    """
    aside = aside_path(path)
    if file is not None:
        fresh = LogFile(_fresh_path(path))
        checkpoints = _redoable_checkpoints(file, after)
        first = checkpoints[0][1] if checkpoints else after
        for some in _chunks(islice(file.read(first), last - first)):
            fresh.copy(some)
            if fresh.is_sync_due:
                fresh.sync()
        fresh.copy_checkpoints(checkpoints)
        fresh.close()
        with contextlib.suppress(sqlite3.Error):  # its last pages may be what is damaged
            file.close()
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.replace(aside)
    if file is not None:
        _fresh_path(path).rename(path)
    return aside


def _redoable_checkpoints(file: LogFile, up_to: int) -> tuple[tuple[int, int], ...]:
    """Return the checkpoints from which every change up to a position can be read."""
    try:
        checkpoints = tuple(each for each in file.checkpoints if each[1] <= up_to)
    except sqlite3.DatabaseError:  # their table is damaged too
        return ()
    for number, (_, position) in enumerate(checkpoints):
        with contextlib.suppress(DamagedLogError):
            if sum(1 for _ in islice(file.read(position), up_to - position)) == up_to - position:
                return checkpoints[number:]
    return ()


def _fresh_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows in lists of a size that fits into memory."""
    rest = iter(rows)
    while some := list(islice(rest, _ROWS_AT_ONCE)):
        yield some


def _record(row: Row, place: Place | None) -> tuple[int | bytes | None, ...]:
    """Return a row of the table; place: where its data is, None: in the row."""
    data, place_columns = (row.data, (None, None, None)) if place is None else (b"", place)
    return (row.position, _checksum(row.position, row.data), data, *place_columns)


def _checksum(position: int, data: bytes) -> int:
    """Return xxh3 of a change and its place, in the range of SQLite's integers."""
    return xxhash.xxh3_64_intdigest(data, seed=position) - _SIGN_BIT


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether an error is about what the file holds, not about reaching it.

    An error in SQL is damage of the tables' definitions, because every statement is a constant.
    """
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
    return error.sqlite_errorcode & 0xFF in damage
