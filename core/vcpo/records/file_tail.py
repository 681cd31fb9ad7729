"""The lines that another process appends to a file."""

from __future__ import annotations

from pathlib import Path


class FileTail:
    """Reads the whole lines that a file gains; an unfinished line waits for its end.

    from_start: whether the first read returns what was written before, too.
    """

    def __init__(self, path: Path, *, from_start: bool) -> None:
        self._path = path
        is_from_end = path.exists() and not from_start
        self._offset_bytes = path.stat().st_size if is_from_end else 0

    def read(self) -> bytes:
        """Return the lines since the last call, each with its end; empty if there is no file."""
        if not self._path.exists():
            return b""
        with self._path.open("rb") as written:
            written.seek(self._offset_bytes)
            whole, newline, _ = written.read().rpartition(b"\n")
        self._offset_bytes += len(whole) + len(newline)
        return whole + newline
