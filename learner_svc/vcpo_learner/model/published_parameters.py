"""The parameters as they were published last, and what differs in them now.

```
parameters --round--> bits --compare with those published last--> few differ:  positions, bits
                                                                  many differ: a new file
```

A rank whose parameters are cut over ranks publishes its own rows of each, and no others. Ranks ask
nothing of each other here, and one of them may have a new file where another one has few changes.

The comparison runs where the parameters are. On a CPU the bits published last are those of the
file itself, so there is no other copy. A GPU keeps a copy of its own, in the published number
format, and sends nothing to the host but what differs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import accumulate
from math import ceil

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vcpo.spec.workloads import Precision
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.model.loading import trainable_parameters
from vcpo_learner.ranks.ranks import SHARD
from vcpo_learner.ranks.sharding import is_sharded, local_part
from vcpo_learner.shared_file import SharedFile

_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BITS = {2: torch.int16, 4: torch.int32}
"""Integers by width in bytes."""
_GAP_BYTES = 2
_TILE = 1 << 17
"""Elements that a CPU compares at a time: they stay in its cache."""
_MAX_INT32 = (1 << 31) - 1
_LEAST_SHARE = 1 / 16
"""Share of the file after which it is clear whether few elements differ."""


class PublishedParameters:
    """Finds what a version changes. Owner: the tensor thread.

    Between two calls of `take` the caller writes the changes of the first into the buffer of the
    last whole file.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._dtype: torch.dtype | None = None
        self._bits: dict[str, Tensor] = {}
        """As published last, flat, by name; on the parameters' device."""

    def take(self, precision: Precision) -> SharedFile | dict[str, ChangedElements]:
        """Return what changed since the last call, by tensor, or all as a safetensors file.

        It is a file at the first call, and if the changes would not take less room.
        """
        dtype = _DTYPES[precision]
        if dtype is not self._dtype:
            return self.whole(precision)
        parameters = own_rows(self._model)
        changes: dict[str, ChangedElements] = {}
        total_bytes = sum(each.numel() for each in parameters.values()) * dtype.itemsize
        seen_bytes = delta_bytes = 0
        for name, now in parameters.items():
            if seen_bytes >= total_bytes * _LEAST_SHARE and delta_bytes >= seen_bytes:
                return self.whole(precision, changes)
            find = changes_on_cpu if now.device.type == "cpu" else changes_on_device
            changes[name] = find(now.reshape(-1), self._bits[name], dtype)
            seen_bytes += now.numel() * dtype.itemsize
            delta_bytes += changes[name].positions.size * (dtype.itemsize + _GAP_BYTES)
        return changes if delta_bytes < total_bytes else self.whole(precision, changes)

    def whole(
        self, precision: Precision, changes: Mapping[str, ChangedElements] | None = None
    ) -> SharedFile:
        """Return all parameters as a safetensors file, rounded into their places in it.

        changes: those of the first parameters since the last call, which are not rounded again.
        """
        dtype, changes = _DTYPES[precision], changes or {}
        parameters = own_rows(self._model)
        file = _PayloadFile({name: each.shape for name, each in parameters.items()}, dtype)
        for name, parameter in parameters.items():
            tensor = file.tensors[name]
            bits = tensor.view(-1).view(_BITS[dtype.itemsize])
            if name in changes:
                bits.copy_(self._bits[name])
                array = bits.numpy()
                array[changes[name].positions] = changes[name].bits.view(array.dtype)
            else:
                tensor.copy_(parameter)
            self._bits[name] = bits.to(parameter.device)
        self._dtype = dtype
        return file.shared


def own_rows(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the rows that this rank holds of each trained parameter, by name, without gradients.

    A parameter of which the rank holds no row is left out; with one rank none is.

    Raises:
        ValueError: if a part of the model is left gathered, so that ranks have the same rows.
    """
    parameters = trainable_parameters(model)
    cut = {name for name, each in parameters.items() if is_sharded(each)}
    if cut and (gathered := sorted(parameters.keys() - cut)):
        raise ValueError(f"{gathered[0]}: is not cut over the ranks, as others are; release it")
    rows = {name: local_part(each.detach()) for name, each in parameters.items()}
    return {name: each for name, each in rows.items() if name not in cut or each.numel()}


def first_rows(model: PreTrainedModel) -> dict[str, int]:
    """Return, for the same parameters, the row of the whole tensor that is the rank's first."""
    parameters = trainable_parameters(model)
    return {name: _first_row(parameters[name]) for name in own_rows(model)}


def _first_row(parameter: Tensor) -> int:
    """Return the number of rows before the rank's own: FSDP2 cuts chunks of ceil(rows / ranks)."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh[SHARD]
    return mesh.get_local_rank() * ceil(len(parameter) / mesh.size())


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
    """A safetensors file in shared memory whose tensors are written in place.

    Source: https://github.com/huggingface/safetensors#format.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        """Lay a file out; its tensors are zero."""
        ends = list(accumulate(shape.numel() * dtype.itemsize for shape in shapes.values()))
        begins = [0, *ends]
        described = {
            name: {
                "dtype": _SAFETENSORS_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            for (name, shape), begin, end in zip(shapes.items(), begins, ends, strict=False)
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        header = struct.pack("<Q", len(text)) + text
        self.shared = SharedFile.of_size(len(header) + begins[-1])
        """The whole file."""
        content = self.shared.content
        content[: len(header)] = header
        self.tensors = {
            name: _view(content, dtype, shape, len(header) + begin)
            for (name, shape), begin in zip(shapes.items(), begins, strict=False)
        }
        """The tensors by name, in the buffer's memory."""


def _view(buffer: memoryview, dtype: torch.dtype, shape: torch.Size, begin: int) -> Tensor:
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=shape.numel(), offset=begin).view(shape)
