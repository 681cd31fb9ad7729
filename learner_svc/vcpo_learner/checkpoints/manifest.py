"""The manifest of a checkpoint: its step, its spec, and the checksums of its files.

A disk may return wrong bits, a copy may be incomplete, and somebody may rename a folder. The file
formats of tensors detect none of this. So the manifest holds a checksum for each file and one for
itself.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

FORMAT = 6
MANIFEST_FILE = "meta.json"
_CHECKSUM = "xxh3"
_BLOCK_BYTES = 1 << 22
_READERS = 4
"""Files that are read at once: one does not use up a fast disk."""


class DamageError(ValueError):
    """A file differs from what was written; the message names the file and the difference."""


class FormatError(ValueError):
    """A manifest of another version of this program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksum:
    """Size and checksum of a file."""

    size_bytes: int
    xxh3: str
    """64 bits, in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> FileChecksum:
        """Compute the checksum of a file, block by block."""
        digest, size_bytes = xxhash.xxh3_64(), 0
        with path.open("rb") as content:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
                size_bytes += len(block)
        return cls(size_bytes=size_bytes, xxh3=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The description of a checkpoint."""

    step: int
    spec: Mapping[str, Any]
    """The fields that a resumed run must share, `vcpo.api.continuation_document`."""
    files: Mapping[str, FileChecksum]
    """Checksums of the files, by path in the checkpoint's folder."""
    healthy: bool = True
    """Whether the run was well, by its early warning and its rewards; a rollback goes back to such
    a checkpoint only."""

    def write(self, folder: Path) -> None:
        """Write the manifest into the checkpoint's folder."""
        document = {"format": FORMAT, **asdict(self)}
        document[_CHECKSUM] = _checksum_of(document)
        (folder / MANIFEST_FILE).write_text(json.dumps(document, indent=1) + "\n")

    def check_files(self, folder: Path) -> None:
        """Compare every file with its checksum.

        Raises:
            DamageError: naming the first file that differs.
        """
        with ThreadPoolExecutor(max_workers=_READERS) as readers:
            # The list raises what a reader raises.
            list(readers.map(partial(_check_file, folder), self.files, self.files.values()))


def _check_file(folder: Path, name: str, expected: FileChecksum) -> None:
    """Compare a file with its checksum; nothing is read of what has another size.

    Raises:
        DamageError: if it differs, or is no plain file in the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DamageError(f"{folder / MANIFEST_FILE}: file {name!r:.200}: must be in the folder")
    try:
        status = (folder / name).stat()
        if not stat.S_ISREG(status.st_mode):  # a device has no end, and a pipe may have no writer
            raise DamageError(f"{folder / name}: must be a plain file")
        if status.st_size != expected.size_bytes:
            sizes = f"must be {expected.size_bytes} bytes, has {status.st_size}"
            raise DamageError(f"{folder / name}: {sizes}")
        found = FileChecksum.of(folder / name)
    except OSError as error:
        raise DamageError(f"{folder / name}: cannot be read ({error.strerror})") from error
    if found != expected:
        checksums = f"its checksum must be {expected.xxh3}, is {found.xxh3}"
        raise DamageError(f"{folder / name}: {checksums}")


def file_checksums(folder: Path, names: Iterable[str]) -> dict[str, FileChecksum]:
    """Return the checksums of files in a folder, by name."""
    return {name: FileChecksum.of(folder / name) for name in names}


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest and check its checksum.

    Raises:
        DamageError: if it is unreadable or differs from what was written.
        FormatError: if another version of this program wrote it.
    """
    path = folder / MANIFEST_FILE
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_intact = document[_CHECKSUM] == _checksum_of(document)
        file_format = document["format"]
        manifest = _manifest(document) if file_format == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DamageError(f"{path}: cannot be read ({cause:.200})") from error
    if not is_intact:
        raise DamageError(f"{path}: its checksum differs from its content")
    if manifest is None:
        raise FormatError(f"{path}: has format {file_format}, this version reads {FORMAT}")
    return manifest


def _manifest(document: Mapping[str, Any]) -> CheckpointManifest:
    if type(document["step"]) is not int or document["step"] < 0:
        raise ValueError(f"step is {document['step']!r}, must be a whole number of at least 0")
    return CheckpointManifest(
        step=document["step"],
        spec=dict(document["spec"]),
        files={name: FileChecksum(**entry) for name, entry in document["files"].items()},
        healthy=document["healthy"],
    )


def _checksum_of(document: Mapping[str, Any]) -> str:
    """Return the checksum of a document without its own checksum, whatever its layout."""
    rest = {name: value for name, value in document.items() if name != _CHECKSUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())
