"""The policy's state as it was published last, and what differs in it now.

Buffers are not rounded: a router's bias decides between experts by small differences, and some
buffers are integers. A rank whose parameters are cut over ranks publishes its own rows of each, and
the first rank the buffers too. Ranks ask nothing of each other here, and one of them may have a new
file where another one has few changes.

On a CPU the bits published last are those of the file itself. A GPU keeps a copy of its own, in the
published number format, and sends nothing to the host but what differs.

A file in bfloat16 is laid out in memory that its owner gives, since few elements will change in it.
A file in float32 changes nearly everywhere, and the next one takes its memory.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from math import ceil
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vcpo.api.workloads import Precision
from vcpo.wire.deltas import ChangedElements
from vcpo.wire.weights import PayloadMemory, file_header
from vcpo_learner.policy_state import policy_state, trainable_parameters, trained_buffers
from vcpo_learner.ranks.ranks import SHARD
from vcpo_learner.ranks.sharding import is_sharded, local_part

_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}
_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by width in bytes."""
_GAP_BYTES = 2
_TILE = 1 << 17
"""Elements that a CPU compares at a time: they stay in its cache."""
_MAX_INT32 = (1 << 31) - 1
_LEAST_SHARE = 1 / 16
"""Share of the file after which it is clear whether few elements differ."""


class PublishedState:
    """Finds what a version changes. Owner: the tensor thread.

    Between two calls of `take` the caller writes the changes of the first into the buffer of the
    last whole file.

    memory: gives room for a file in bfloat16, which replaces the one before.
    """

    def __init__(
        self, model: PreTrainedModel, memory: Callable[[int], PayloadMemory] = bytearray
    ) -> None:
        self._model = model
        self._memory = memory
        self._dtype: torch.dtype | None = None
        self._file: _PayloadFile | None = None
        self._bits: dict[str, Tensor] = {}
        """Bits that were published last, flat, by tensor name, on the tensors' device."""
        self.first_rows: dict[str, int] = {}
        """Of the same tensors, the row of the whole tensor that is the rank's first."""

    def take(self, precision: Precision) -> PayloadMemory | dict[str, ChangedElements]:
        """Return what changed since the last call, by tensor, or all as a safetensors file.

        It is a file at the first call, and if the changes would not take less room.
        """
        dtype = _DTYPES[precision]
        if dtype is not self._dtype:
            return self.whole(precision)
        rows = own_rows(self._model)
        dtypes = self._dtypes(rows, dtype)
        changes: dict[str, ChangedElements] = {}
        total_bytes = sum(each.numel() * dtypes[name].itemsize for name, each in rows.items())
        seen_bytes = delta_bytes = 0
        for name, now in rows.items():
            if seen_bytes >= total_bytes * _LEAST_SHARE and delta_bytes >= seen_bytes:
                return self.whole(precision)
            width = dtypes[name].itemsize
            find = changes_on_cpu if now.device.type == "cpu" else changes_on_device
            changes[name] = find(now.reshape(-1), self._bits[name], dtypes[name])
            seen_bytes += now.numel() * width
            delta_bytes += changes[name].positions.size * (width + _GAP_BYTES)
        return changes if delta_bytes < total_bytes else self.whole(precision)

    def whole(self, precision: Precision) -> PayloadMemory:
        """Return the state as a safetensors file, its parameters rounded into their places."""
        rows, dtype = own_rows(self._model), _DTYPES[precision]
        dtypes = self._dtypes(rows, dtype)
        if self._file is None or dtype is not self._dtype or dtype is torch.bfloat16:
            self._file, self._bits = None, {}  # frees the memory of the file before
            memory = self._memory if dtype is torch.bfloat16 else bytearray
            tensors = {name: (each.shape, dtypes[name]) for name, each in rows.items()}
            self._file = _PayloadFile(tensors, memory)
            state = policy_state(self._model)
            self.first_rows = {name: _first_row(state[name]) for name in rows}
        for name, now in rows.items():
            tensor = self._file.tensors[name]
            tensor.copy_(now)
            self._bits[name] = tensor.view(-1).view(_BITS[dtypes[name].itemsize]).to(now.device)
        self._dtype = dtype
        return self._file.content

    def _dtypes(self, rows: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, torch.dtype]:
        buffers = trained_buffers(self._model)
        return {name: each.dtype if name in buffers else dtype for name, each in rows.items()}


def own_rows(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the rows that this rank publishes of each tensor, by name, without gradients.

    A tensor of which the rank publishes no row is left out; with one rank none is.
    """
    parameters = trainable_parameters(model)
    cut = {name for name, each in parameters.items() if is_sharded(each)}
    if cut and (gathered := sorted(parameters.keys() - cut)):
        raise ValueError(f"{gathered[0]}: is not cut over the ranks, as others are; release it")
    rows = {name: local_part(each.detach()) for name, each in parameters.items()}
    rows = {name: each for name, each in rows.items() if name not in cut or each.numel()}
    is_first = all(_rank(parameters[name]) == 0 for name in cut)
    return rows | (trained_buffers(model) if is_first else {})


def _first_row(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 0
    return _rank(tensor) * ceil(len(tensor) / tensor.device_mesh[SHARD].size())


def _rank(tensor: Tensor) -> int:
    return cast("DTensor", tensor).device_mesh[SHARD].get_local_rank()


def changes_on_cpu(now: Tensor, was: Tensor, dtype: torch.dtype) -> ChangedElements:
    """Return where a flat tensor's bits in `dtype` differ from those published last.

    was: these bits, flat, in the published file. Whoever publishes the changes writes them there.
    """
    # All of a tile stays in memory that is used before: fresh pages cost more than the comparison.
    rounded = torch.empty(min(_TILE, now.numel()), dtype=dtype)
    bits, published = rounded.view(_BITS[dtype.itemsize]).numpy(), was.numpy()
    differs = np.empty(len(bits), dtype=np.bool_)
    # Half the bytes of what is kept until the delta is made, but for tensors beyond 2^31 elements.
    number = np.int32 if now.numel() <= _MAX_INT32 else np.int64
    positions, values = [np.empty(0, dtype=number)], [bits[:0]]
    for begin in range(0, now.numel(), _TILE):
        tile = now[begin : begin + _TILE]
        size = tile.numel()
        rounded[:size].copy_(tile)
        np.not_equal(bits[:size], published[begin : begin + size], out=differs[:size])
        found = np.flatnonzero(differs[:size])
        positions.append((found + begin).astype(number))
        values.append(bits[found])
    return ChangedElements(
        positions=np.concatenate(positions),
        bits=np.concatenate(values).view(f"<u{dtype.itemsize}"),
    )


def changes_on_device(now: Tensor, was: Tensor, dtype: torch.dtype) -> ChangedElements:
    """Return where a flat tensor's bits in `dtype` differ from those published last.

    was: these bits, flat, on the tensor's device; brought up to date here.
    """
    bits = now.to(dtype).view(_BITS[dtype.itemsize])
    found = (bits != was).nonzero().flatten()
    was[found] = bits[found]
    return ChangedElements(
        positions=found.cpu().numpy(),
        bits=bits[found].cpu().numpy().view(f"<u{dtype.itemsize}"),
    )


class _PayloadFile:
    """A safetensors file in memory whose tensors are written in place.

    Source: https://github.com/huggingface/safetensors#format.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
        memory: Callable[[int], PayloadMemory],
    ) -> None:
        """Lay a file out for tensors of these shapes and types."""
        # Those of wide elements first, so that each begins at a multiple of its elements' width.
        ordered = sorted(tensors.items(), key=lambda each: -each[1][1].itemsize)
        ends = list(accumulate(shape.numel() * dtype.itemsize for _, (shape, dtype) in ordered))
        begins = [0, *ends]
        header = file_header(
            {
                name: (_SAFETENSORS_NAMES[dtype], shape, shape.numel() * dtype.itemsize)
                for name, (shape, dtype) in ordered
            }
        )
        self.content = memory(len(header) + begins[-1])
        self.content[: len(header)] = header
        self.tensors = {
            name: _view(self.content, dtype, shape, len(header) + begin)
            for (name, (shape, dtype)), begin in zip(ordered, begins, strict=False)
        }
        """The tensors by name, in the buffer's memory."""


def _view(buffer: PayloadMemory, dtype: torch.dtype, shape: torch.Size, begin: int) -> Tensor:
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=shape.numel(), offset=begin).view(shape)
