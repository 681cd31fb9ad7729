"""The manifest of a checkpoint: its step, its spec, and the checksums of its files.

A disk may return wrong bits, a copy may be incomplete, and somebody may rename a folder. The file
formats of tensors detect none of this. So the manifest holds a checksum for each file and one for
itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from vcpo.service.lifecycle import StartError


class WriteError(OSError):
    """A folder could not be written; the message names it and the cause."""


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that replaces `target` after the block; remove it if the block raises.

    Raises:
        WriteError: if the disk does not take it; the incomplete folder is removed, so that the next
            attempt finds as much free space as before.
    """
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        # The new name must be on the disk before the old folder is removed.
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:  # an interrupt must not leave an incomplete folder either
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise WriteError(f"{target}: cannot be written ({error})") from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FORMAT: Final = 7
MANIFEST_FILE: Final = "meta.json"
_CHECKSUM = "xxh3"
_BLOCK_BYTES = 1 << 22
_READERS = 4
"""Files that are read at once: one does not use up a fast disk."""


class CheckpointError(StartError):
    """A checkpoint cannot be used; the message says what to do."""


class DamageError(ValueError):
    """A file differs from what was written; the message names the file and the difference."""


class FileChecksum(BaseModel):
    """Size and checksum of a file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    size_bytes: int
    xxh3: str
    """64 bits, in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> FileChecksum:
        digest, size_bytes = xxhash.xxh3_64(), 0
        with path.open("rb") as content:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
                size_bytes += len(block)
        return cls(size_bytes=size_bytes, xxh3=digest.hexdigest())


class CheckpointManifest(BaseModel):
    """The description of a checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    step: Annotated[int, Field(ge=0)]
    spec: dict[str, Any]
    """The fields that a resumed run must share, `vcpo.api.continuation_document`."""
    files: dict[Annotated[str, Field(pattern=r"^(tensors/)?\w[\w.-]*$")], FileChecksum]
    """Checksums of the files, by path in the checkpoint's folder."""
    healthy: bool = True
    """Whether the run was well, by its early warning and its rewards; a rollback goes back to such
    a checkpoint only."""

    def write(self, folder: Path) -> None:
        document = {"format": FORMAT, **self.model_dump()}
        document[_CHECKSUM] = _checksum_of(document)
        (folder / MANIFEST_FILE).write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a checkpoint's manifest and check its checksum.

        Raises:
            DamageError: if it is unreadable or differs from what was written.
        """
        path = folder / MANIFEST_FILE
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            expected, file_format = document.pop(_CHECKSUM), document["format"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise DamageError(f"{path}: cannot be read ({cause:.200})") from error
        if expected != _checksum_of(document):
            raise DamageError(f"{path}: its checksum differs from its content")
        if document.pop("format") != FORMAT:
            raise CheckpointError(
                f"{path}: has format {file_format}, this version reads {FORMAT}; resume with the"
                " version that wrote it, or start again in another --run-dir"
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise DamageError(f"{path}: {where:.200}: {first['msg']:.200}") from error

    def check_files(self, folder: Path) -> None:
        """Compare every file with its checksum.

        Raises:
            DamageError: naming the first file that differs.
        """
        with ThreadPoolExecutor(max_workers=_READERS) as readers:
            # The list raises what a reader raises.
            list(readers.map(partial(_check_file, folder), self.files, self.files.values()))


def _check_file(folder: Path, name: str, expected: FileChecksum) -> None:
    """Compare a file with its checksum; nothing is read of what has another size."""
    path = folder / name
    try:
        size_bytes = path.stat().st_size
        if not path.is_file():  # a device has no end, and a pipe may have no writer
            raise DamageError(f"{path}: must be a plain file")
        if size_bytes != expected.size_bytes:
            raise DamageError(f"{path}: must be {expected.size_bytes} bytes, has {size_bytes}")
        found = FileChecksum.of(path)
    except OSError as error:
        raise DamageError(f"{path}: cannot be read ({error.strerror})") from error
    if found != expected:
        raise DamageError(f"{path}: its checksum must be {expected.xxh3}, is {found.xxh3}")


def _checksum_of(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())
