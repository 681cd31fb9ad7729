"""The tensors of a version as torch has them: read from its file without a copy, and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO

import torch
from torch import Tensor

from vcpo.wire.weights import CorruptWeightsError, Payload, file_header, tensor_sections

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


def write_tensors(tensors: Mapping[str, Tensor], file: IO[bytes]) -> None:
    """Write tensors as one safetensors file; nothing is joined in memory."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    file.write(
        file_header(
            {n: (names[each.dtype], each.shape, each.nbytes) for n, each in tensors.items()}
        )
    )
    for tensor in tensors.values():
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
