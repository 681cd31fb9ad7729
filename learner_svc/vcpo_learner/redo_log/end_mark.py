"""The mark of the redo log: a small file that says at which change the log must end.

```
redo-log.mark   two slots, written in turn: position, xxh3 of it; 16 bytes each
```

SQLite drops what follows the first bad bit of its write-ahead log without an error, and a log whose
write-ahead log was removed looks like one that ends earlier. Only a file beside it can tell.

The mark follows each commit and is not synced. A process that dies between a commit and its mark
leaves a mark that is one commit behind, which is no loss. A torn write leaves the other slot.
Nothing is ever lost because of the mark: one that cannot be written stays behind.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import Final

import xxhash

_NAME: Final = "redo-log.mark"
_SLOT: Final = struct.Struct("<QQ")
_EMPTY: Final = bytes(_SLOT.size)


class EndMark:
    """The mark of one log. One thread at a time may use it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._file: int | None = None
        """Descriptor of the file; None before `begin`."""
        self._next_slot = 0
        self.position = self._read()
        """Position of the newest change that an earlier process committed; None if no slot can be
        read."""

    def begin(self, position: int) -> None:
        """Set the mark to the newest change, whatever it was; later calls do nothing.

        position: of the newest change before the first commit of this process.
        """
        if self._file is not None:
            return
        file, data = None, _slot(position) + _EMPTY
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
            if os.pwrite(file, data, 0) == len(data):
                self._file, self._next_slot = file, 1
        if file is not None and self._file is None:  # the next commit tries again
            os.close(file)

    def move(self, position: int) -> None:
        """Set the mark to the newest change after a commit."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                offset = self._next_slot * _SLOT.size
                if os.pwrite(self._file, _slot(position), offset) == _SLOT.size:
                    self._next_slot = 1 - self._next_slot  # a torn one must not cost the other

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> int | None:
        try:
            with self._path.open("rb") as file:
                data = file.read(2 * _SLOT.size)
        except OSError:
            return None
        slots = (data[at : at + _SLOT.size] for at in range(0, len(data), _SLOT.size))
        return max(filter(None, map(_position, slots)), default=None)


def _slot(position: int) -> bytes:
    return _SLOT.pack(position, _checksum(position))


def _position(slot: bytes) -> int | None:
    """Return the position that a slot holds; None if it was torn or damaged."""
    if len(slot) < _SLOT.size:
        return None
    position, checksum = _SLOT.unpack(slot)
    return int(position) if checksum == _checksum(position) else None


def _checksum(position: int) -> int:
    return xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"))
