"""The tensors of a version, without a copy: read from its shards, and written to one file."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor

from vcpo.wire.weights import CorruptWeightsError, Payload, tensor_sections
from vcpo_rollout.engines.engine import PolicyWeights

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorRows:
    """Rows of a tensor, in the memory of their shard."""

    rows: Tensor
    """[num_rows, ...]; a tensor without dimensions has one row, itself."""
    first_row: int = 0
    """Row of the whole tensor."""


WholeTensor = Sequence[TensorRows]
"""A tensor's rows, each once, in order; at least one part."""


def whole_tensors(weights: PolicyWeights) -> dict[str, WholeTensor]:
    """Return a version's tensors by name, as the rows that its shards hold.

    Raises:
        CorruptWeightsError: as `tensors_of`.
    """
    parts: defaultdict[str, list[TensorRows]] = defaultdict(list)
    for shard in weights.shards:
        for name, rows in tensors_of(shard.payload).items():
            parts[name].append(TensorRows(rows=rows, first_row=shard.first_rows.get(name, 0)))
    for found in parts.values():
        found.sort(key=lambda part: part.first_row)
    return dict(parts)


def whole_shape(tensor: WholeTensor) -> tuple[int, ...]:
    """Return the shape of a tensor."""
    first = tensor[0].rows.shape
    return (sum(len(part.rows) for part in tensor), *first[1:]) if first else ()


def join_rows(tensor: WholeTensor) -> Tensor:
    """Return a tensor in one piece: a copy, unless one shard holds all of it."""
    return tensor[0].rows if len(tensor) == 1 else torch.cat([part.rows for part in tensor])


def elements_at(tensor: WholeTensor, positions: Tensor) -> Tensor:
    """Return the elements at rising positions of the flat tensor, [num_positions]."""
    elements, end = [], 0
    for part in tensor:
        begin, end = end, end + part.rows.numel()
        first, last = torch.searchsorted(positions, torch.tensor([begin, end])).tolist()
        elements.append(part.rows.view(-1)[positions[first:last] - begin])
    return torch.cat(elements)


def joined_tensors(weights: PolicyWeights) -> dict[str, Tensor]:
    """Return a version's tensors by name; those of which several shards hold rows are copied.

    Raises:
        CorruptWeightsError: as `tensors_of`.
    """
    return {name: join_rows(tensor) for name, tensor in whole_tensors(weights).items()}


def tensors_of(payload: Payload) -> dict[str, Tensor]:
    """Return the tensors of a file by name, in the file's own memory; that of `bytes` is copied.

    Raises:
        CorruptWeightsError: if it is no safetensors file, or a tensor's type is unknown.
    """
    if isinstance(payload, bytes):  # torch has no tensors that cannot be written to
        payload = bytearray(payload)
    tensors = {}
    for name, section in tensor_sections(payload).items():
        dtype, shape = _DTYPES.get(section.entry.dtype), tuple(section.entry.shape)
        size_bytes = section.end - section.begin
        if dtype is None or size_bytes != section.num_elements * dtype.itemsize:
            raise CorruptWeightsError(
                f"tensor {name!r}: {section.entry.dtype}{list(shape)} is not {size_bytes} bytes of"
                f" a known type ({', '.join(_DTYPES)})"
            )
        if not size_bytes:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        flat = torch.frombuffer(
            payload, dtype=dtype, count=section.num_elements, offset=section.begin
        )
        tensors[name] = flat.view(shape)
    return tensors


def write_tensors(tensors: Mapping[str, WholeTensor], file: IO[bytes]) -> None:
    """Write tensors as one safetensors file, part by part; nothing is joined in memory."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + sum(part.rows.nbytes for part in tensor)
        header[name] = {
            "dtype": names[tensor[0].rows.dtype],
            "shape": whole_shape(tensor),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        for part in tensor:
            file.write(part.rows.reshape(-1).view(torch.uint8).numpy().data)
