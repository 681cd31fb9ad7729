"""The index of a checkpoint's tensors: which bytes of which file are which rows of which tensor.

It is JSON and not DCP's pickle. A pickle may run code, and one that may name a few classes only can
still change these classes for the whole process. The index is refused unless `TensorFiles` could
have written it: every entry is a tensor, of float32 unless it is a buffer, its parts are its rows
one after another, and each part has bytes of its own in a file of the folder. So what a reader
allocates is bounded by the size of the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vcpo_learner.checkpoints.manifest import DamageError

INDEX_FILE: Final = ".metadata"
PARAMETERS: Final = "parameters"
BUFFERS: Final = "buffers"
MOMENTS: Final = "moments"

_MOST_INDEX_BYTES: Final = 1 << 28
"""About 2,000,000 parts."""
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST: Final = 1 << 53
_CURE: Final = (
    "no learner writes that; restore the checkpoint from a copy, or remove its folder to use the"
    " checkpoint before"
)

_Place = Annotated[int, Field(ge=0, le=_LARGEST)]
_Count = Annotated[int, Field(ge=1, le=_LARGEST)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TensorPart(_Entry):
    """Rows of a tensor, in a file of `torch.save`'s format."""

    file: Annotated[str, Field(pattern=r"^__[0-9]{1,9}_[0-9]{1,9}\.distcp$", max_length=32)]
    """Name in the folder."""
    begin: _Place
    """First byte in the file."""
    length: _Count
    """Bytes in the file, with those that describe the rows."""
    first_row: _Place
    num_rows: _Count

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.begin + self.length


class IndexedTensor(_Entry):
    """A tensor; one without axes counts as one row."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(_DTYPES)})$")]
    size: Annotated[tuple[_Count, ...], Field(max_length=8)]
    parts: Annotated[tuple[TensorPart, ...], Field(min_length=1)]
    """Parts of the tensor, ordered by their first row."""

    @property
    def num_rows(self) -> int:
        """Length of the first axis."""
        return self.size[0] if self.size else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return _DTYPES[self.dtype].itemsize * math.prod(self.size[1:])

    def chunk(self, part: TensorPart) -> ChunkStorageMetadata:
        """Return where a part lies in the tensor, as DCP says it."""
        if not self.size:
            return ChunkStorageMetadata(offsets=torch.Size(), sizes=torch.Size())
        rest = self.size[1:]
        return ChunkStorageMetadata(
            offsets=torch.Size((part.first_row, *(0 for _ in rest))),
            sizes=torch.Size((part.num_rows, *rest)),
        )


class TensorIndex(_Entry):
    """All tensors of a checkpoint, by name."""

    tensors: Mapping[
        Annotated[str, Field(pattern=rf"^({PARAMETERS}|{BUFFERS}|{MOMENTS})\.")], IndexedTensor
    ]

    @classmethod
    def of(cls, metadata: Metadata, written: Mapping[MetadataIndex, _StorageInfo]) -> TensorIndex:
        """Return the index of what DCP has written.

        written: where each chunk is.

        Raises:
            ValueError: naming the entry that is no such tensor.
        """
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not (
                isinstance(entry, TensorStorageMetadata)
                and _may_have(name, _NAMES.get(entry.properties.dtype))
                and entry.size.numel()
            ):
                raise ValueError(
                    f"tensor {name}: must be of float32 and not empty, is {entry!s:.200}"
                )
            tensors[name] = IndexedTensor(
                dtype=_NAMES[entry.properties.dtype],
                size=tuple(entry.size),
                parts=tuple(sorted(_parts(name, entry, written), key=_row)),
            )
        return cls(tensors=tensors)

    def metadata(self) -> Metadata:
        """Return the index as DCP reads it."""
        entries, places = {}, {}
        for name, tensor in self.tensors.items():
            chunks = [tensor.chunk(part) for part in tensor.parts]
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[tensor.dtype]),
                size=torch.Size(tensor.size),
                chunks=chunks,
            )
            for chunk, part in zip(chunks, tensor.parts, strict=True):
                place = _StorageInfo(part.file, part.begin, part.length)
                places[MetadataIndex(name, chunk.offsets)] = place
        return Metadata(state_dict_metadata=dict(entries), storage_data=places)

    def problems(self, folder: Path) -> Iterator[str]:
        """Yield what is wrong beyond the fields: an entry, and what it must be."""
        sizes = {name: _file_bytes(folder / name) for name in {part.file for part in self._parts()}}
        for name, tensor in self.tensors.items():
            if not _may_have(name, tensor.dtype):
                yield f"{name}: must be of float32, is of {tensor.dtype}"
            row = 0
            for number, part in enumerate(tensor.parts):
                where = f"{name}, part {number}"
                if part.first_row != row:
                    yield f"{where}: must begin at row {row}, begins at {part.first_row}"
                row = part.first_row + part.num_rows
                if part.length < (least := part.num_rows * tensor.row_bytes):
                    yield f"{where}: must have at least {least} bytes, has {part.length}"
                if part.end > (most := sizes[part.file]):
                    yield f"{where}: ends at byte {part.end} of {part.file}, which has {most}"
            if row != tensor.num_rows:
                yield f"{name}: must have {tensor.num_rows} rows, its parts have {row}"
        ordered = sorted(self._parts(), key=lambda part: (part.file, part.begin))
        for before, after in pairwise(ordered):
            if before.file == after.file and after.begin < before.end:
                yield f"{after.file}: byte {after.begin} belongs to two parts"

    def _parts(self) -> Iterator[TensorPart]:
        return (part for tensor in self.tensors.values() for part in tensor.parts)


def read_index(folder: Path) -> TensorIndex:
    """Read and check the index in a folder of `TensorFiles`.

    Raises:
        DamageError: naming the file, the entry and the cure, unless it is a plain index.
    """
    path = folder / INDEX_FILE
    try:
        if not 0 < _file_bytes(path) <= _MOST_INDEX_BYTES:
            most = f"at most {_MOST_INDEX_BYTES} bytes"
            raise DamageError(f"{path}: must be a plain file of {most}; {_CURE}")
        index = TensorIndex.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DamageError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the index"
        raise DamageError(f"{path}: {where:.200}: {first['msg']:.200}; {_CURE}") from error
    if (problem := next(index.problems(folder), None)) is not None:
        raise DamageError(f"{path}: {problem:.300}; {_CURE}")
    return index


def _parts(
    name: str, entry: TensorStorageMetadata, written: Mapping[MetadataIndex, _StorageInfo]
) -> Iterator[TensorPart]:
    """Yield the parts of a tensor that have rows: of few rows a rank may hold none."""
    for chunk in entry.chunks:
        if chunk.sizes.numel():
            place = written[MetadataIndex(name, chunk.offsets)]
            yield TensorPart(
                file=place.relative_path,
                begin=place.offset,
                length=place.length,
                first_row=chunk.offsets[0] if chunk.offsets else 0,
                num_rows=chunk.sizes[0] if chunk.sizes else 1,
            )


def _may_have(name: str, dtype: str | None) -> bool:
    """Whether a tensor may have a type: that of a buffer may be any."""
    return dtype == "float32" or (dtype is not None and name.startswith(f"{BUFFERS}."))


def _row(part: TensorPart) -> int:
    return part.first_row


def _file_bytes(path: Path) -> int:
    """Return the size of a regular file; 0 for anything else, of which nothing is read."""
    return path.stat().st_size if path.is_file() else 0
