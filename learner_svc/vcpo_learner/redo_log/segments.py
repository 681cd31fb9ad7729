"""Files that hold the data of large changes, beside the table that says where each is.

```
redo-log/000001   data of change 7, 9, 12 ...   written from the start to the end, then never again
redo-log/000002   data of change 90, 91 ...     the table's rows say: segment 2, offset, size
```

SQLite would copy large data twice, into its write-ahead log and into the table, and sum it up eight
bytes at a time; a file takes it in one copy (`benchmarks.learner.ingest`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

_SEGMENT_BYTES: Final = 32 << 20
"""A segment that has this size at a sync is followed by a new one. It is removed as a whole, so up
to so much is kept that nobody needs."""


class Place(NamedTuple):
    """Where the data of a change is."""

    segment: int
    offset: int
    size: int


class Segments:
    """The segments of one run. One thread at a time may use them.

    Each object begins a segment of its own, after whatever another process left unfinished.

    Raises:
        OSError: from every method, if the disk fails.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None
        """Descriptor of the segment that is written; None before the first write."""
        self._number = 0
        self._end = self._written_end = 0

    def write(self, data: Sequence[bytes]) -> list[Place]:
        """Write data, one after another; unless `keep` follows, the next data takes its place."""
        if not data:
            return []
        file = self._file if self._file is not None else self._begin()
        places, end = [], self._end
        for each in data:
            _write_at(file, each, end)
            places.append(Place(self._number, end, len(each)))
            end += len(each)
        self._written_end = end
        return places

    def keep(self) -> None:
        """Let the next data follow what was written last."""
        self._end = self._written_end

    @property
    def is_full(self) -> bool:
        """Whether the next `sync` ends the segment that is written."""
        return self._end >= _SEGMENT_BYTES

    def read(self, place: Place) -> bytes:
        """Return the data at a place; less than its size, if the segment ends before."""
        with self._path(place.segment).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.size)

    def remove_before(self, segment: int | None) -> None:
        """Remove the segments before one; None removes all but the one that is written."""
        for number in self._numbers():
            is_written = self._file is not None and number == self._number
            if not is_written and (segment is None or number < segment):
                self._path(number).unlink(missing_ok=True)

    def sync(self) -> None:
        """Bring what was written to the disk, and end a segment that is full.

        Raises:
            FileNotFoundError: if somebody has removed the segment that is written.
        """
        if self._file is None:
            return
        if not os.fstat(self._file).st_nlink:
            raise FileNotFoundError(f"{self._path(self._number)}: was removed")
        os.fsync(self._file)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # its entry for a new segment
        finally:
            os.close(folder)
        if self.is_full:
            self.close()

    def close(self) -> None:
        """Close the segment that is written; the next data begins another one."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._end = self._written_end = 0

    def _begin(self) -> int:
        self._folder.mkdir(exist_ok=True)
        number = max(self._numbers(), default=0) + 1
        self._file = os.open(self._path(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._number, self._end, self._written_end = number, 0, 0
        return self._file

    def _numbers(self) -> list[int]:
        """Return the numbers of all segments that are there."""
        if not self._folder.exists():
            return []
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}"


def _write_at(file: int, data: bytes, offset: int) -> None:
    """Write all of some data at an offset of a file."""
    num_bytes = os.pwrite(file, data, offset)
    while num_bytes < len(data):  # a disk that fills up takes a part first
        num_bytes += os.pwrite(file, memoryview(data)[num_bytes:], offset + num_bytes)
