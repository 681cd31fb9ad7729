"""The parameters as they were published last, and what differs in them now.

```
parameters --round--> bits --compare with those published last--> few differ:  positions, bits
                                                                  many differ: a new file
```

The comparison runs where the parameters are. On a CPU the bits published last are those of the
file itself, so there is no other copy. A GPU keeps a copy of its own, in the published number
format, and sends nothing to the host but what differs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vcpo.spec.workloads import Precision
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.model.loading import rounded_whole, trainable_parameters

_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BITS = {2: torch.int16, 4: torch.int32}
"""Integers by width in bytes."""
_GAP_BYTES = 2
_TILE = 1 << 17
"""Elements that a CPU compares at a time: they stay in its cache."""
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

    def take(self, precision: Precision) -> bytearray | dict[str, ChangedElements]:
        """Return what changed since the last call, by tensor, or all as a safetensors file.

        It is a file at the first call, and if the changes would not take less room. With several
        ranks, all of them must call it or `gather_policy`.
        """
        dtype = _DTYPES[precision]
        if dtype is not self._dtype:
            return self.whole(precision)
        parameters = trainable_parameters(self._model)
        changes: dict[str, ChangedElements] = {}
        total_bytes = sum(each.numel() for each in parameters.values()) * dtype.itemsize
        seen_bytes = delta_bytes = 0
        for name, parameter in parameters.items():
            if seen_bytes >= total_bytes * _LEAST_SHARE and delta_bytes >= seen_bytes:
                return self.whole(precision, changes)
            now = rounded_whole(parameter, dtype)
            find = changes_on_cpu if now.device.type == "cpu" else changes_on_device
            changes[name] = find(now.reshape(-1), self._bits[name], dtype)
            seen_bytes += now.numel() * dtype.itemsize
            delta_bytes += changes[name].positions.size * (dtype.itemsize + _GAP_BYTES)
        return changes if delta_bytes < total_bytes else self.whole(precision, changes)

    def whole(
        self, precision: Precision, changes: Mapping[str, ChangedElements] | None = None
    ) -> bytearray:
        """Return all parameters as a safetensors file, rounded into their places in it.

        changes: those of the first parameters since the last call. They are not gathered again, as
            all ranks gather each parameter once.
        """
        dtype, changes = _DTYPES[precision], changes or {}
        parameters = trainable_parameters(self._model)
        file = _PayloadFile({name: each.shape for name, each in parameters.items()}, dtype)
        for name, parameter in parameters.items():
            tensor = file.tensors[name]
            bits = tensor.view(-1).view(_BITS[dtype.itemsize])
            if name in changes:
                bits.copy_(self._bits[name])
                array = bits.numpy()
                array[changes[name].positions] = changes[name].bits.view(array.dtype)
            else:
                tensor.copy_(rounded_whole(parameter, dtype))
            self._bits[name] = bits.to(parameter.device)
        self._dtype = dtype
        return file.buffer


def gather_policy(model: PreTrainedModel, precision: Precision) -> None:
    """Take part in another rank's `PublishedParameters`, and keep nothing."""
    for parameter in trainable_parameters(model).values():
        rounded_whole(parameter, _DTYPES[precision])


def changes_on_cpu(now: Tensor, was: Tensor, dtype: torch.dtype) -> ChangedElements:
    """Return where a flat tensor's bits in `dtype` differ from those published last.

    was: these bits, flat, in the published file. Whoever publishes the changes writes them there.
    """
    # All of a tile stays in memory that is used before: fresh pages cost more than the comparison.
    rounded = torch.empty(min(_TILE, now.numel()), dtype=dtype)
    bits, published = rounded.view(_BITS[dtype.itemsize]).numpy(), was.numpy()
    differs = np.empty(len(bits), dtype=np.bool_)
    positions, values = [np.empty(0, dtype=np.int64)], [bits[:0]]
    for begin in range(0, now.numel(), _TILE):
        tile = now[begin : begin + _TILE]
        size = tile.numel()
        rounded[:size].copy_(tile)
        np.not_equal(bits[:size], published[begin : begin + size], out=differs[:size])
        found = np.flatnonzero(differs[:size])
        positions.append(found + begin)
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
        self.buffer = bytearray(len(header) + begins[-1])
        """The whole file."""
        self.buffer[: len(header)] = header
        self.tensors = {
            name: _view(self.buffer, dtype, shape, len(header) + begin)
            for (name, shape), begin in zip(shapes.items(), begins, strict=False)
        }
        """The tensors by name, in the buffer's memory."""


def _view(buffer: bytearray, dtype: torch.dtype, shape: torch.Size, begin: int) -> Tensor:
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=shape.numel(), offset=begin).view(shape)
