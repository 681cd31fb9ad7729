"""The manifest of a checkpoint: which files are part of it, and what each of them must be.

A disk gives back other bits than it was given, a copy stops half-way, a folder is renamed by hand:
the formats of tensors notice none of that. Hence a sum for each file, and one of the manifest
itself, so that whatever is read is what was written, for the step that its folder names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

FORMAT = 2
MANIFEST_FILE = "meta.json"
_SUM = "xxh3"
_BLOCK_BYTES = 1 << 22


class DamageError(ValueError):
    """A file that is not what was written; names it and says in which way it differs."""


class FormatError(ValueError):
    """A manifest of another version of this program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """What a file must be."""

    size_bytes: int
    xxh3: str
    """Of 64 bits, in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> FileSum:
        """Read a file, in blocks, and sum it up."""
        digest, size_bytes = xxhash.xxh3_64(), 0
        with path.open("rb") as content:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
                size_bytes += len(block)
        return cls(size_bytes=size_bytes, xxh3=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    spec: Mapping[str, Any]
    """What a continuation must share, `vcpo.spec.continuation_document`."""
    files: Mapping[str, FileSum]
    """By name within the checkpoint's folder."""

    def write(self, folder: Path) -> None:
        """Write it into the checkpoint's folder."""
        document = {"format": FORMAT, **asdict(self)}
        document[_SUM] = _sum_of(document)
        (folder / MANIFEST_FILE).write_text(json.dumps(document, indent=1) + "\n")

    def check_files(self, folder: Path) -> None:
        """Read every file and compare it with its sum.

        Raises:
            DamageError: naming the first file that differs.
        """
        for name, expected in self.files.items():
            try:
                found = FileSum.of(folder / name)
            except OSError as error:
                raise DamageError(f"{folder / name}: cannot be read ({error.strerror})") from error
            if found.size_bytes != expected.size_bytes:
                sizes = f"must be {expected.size_bytes} bytes, has {found.size_bytes}"
                raise DamageError(f"{folder / name}: {sizes}")
            if found != expected:
                sums = f"its sum must be {expected.xxh3}, is {found.xxh3}"
                raise DamageError(f"{folder / name}: {sums}")


def file_sums(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """Sum up files as they are read back from a folder."""
    return {name: FileSum.of(folder / name) for name in names}


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest, and check that it is the one that was written.

    Raises:
        DamageError: when it is not, or speaks of other files than a checkpoint has.
        FormatError: when another version of this program wrote it.
    """
    path = folder / MANIFEST_FILE
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found_sum, written_sum = _sum_of(document), document.get(_SUM)
        file_format = document["format"]
        manifest = _manifest(document) if file_format == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DamageError(f"{path}: cannot be read ({cause:.200})") from error
    # Formats before this one had no sum.
    if written_sum != found_sum and (written_sum is not None or manifest is not None):
        raise DamageError(f"{path}: its own sum differs from what it says")
    if manifest is None:
        raise FormatError(f"{path}: has format {file_format}, this version reads {FORMAT}")
    return manifest


def _manifest(document: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=document["step"],
        spec=dict(document["spec"]),
        files={name: FileSum(**entry) for name, entry in document["files"].items()},
    )


def _sum_of(document: Mapping[str, Any]) -> str:
    """The sum of all that a document says but for the sum itself, however it is laid out."""
    rest = {name: value for name, value in document.items() if name != _SUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())
