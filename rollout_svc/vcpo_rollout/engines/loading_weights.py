"""Reads and checks a version's weights as a whole, then copies them into a model in place.

A model holds parameters and persistent buffers. Other buffers, such as rotary frequencies, are
computed when it is built.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from vcpo.service.persistent_buffers import own_buffers
from vcpo.wire.deltas import Positions
from vcpo.wire.weights import CorruptWeightsError, Payload, file_header, tensor_sections
from vcpo_rollout.engines.engine import EngineError, PolicyWeights

_MAX_PROBLEMS_SHOWN = 5
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


def held_names(model: Module) -> list[list[str]]:
    """Return all names of each tensor of the state, in the order of the model's modules."""
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False)) | own_buffers(module)
        for name, tensor in own.items():
            names[tensor].append(f"{path}.{name}".removeprefix("."))
    return list(names.values())


def held_tensor(model: Module, name: str) -> Tensor:
    """Return a tensor of the state by one of its names."""
    path, _, own = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), own)
    return tensor


def held_tensors(model: Module) -> dict[str, Tensor]:
    """Return the state, each tensor under its first name."""
    return {names[0]: held_tensor(model, names[0]) for names in held_names(model)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPatch:
    """New values of some elements of a parameter, with its dtype and on its device."""

    positions: Tensor
    """Positions in the flat parameter, [num_changes], int64."""
    values: Tensor
    """[num_changes]."""


StagedWeights = Mapping[str, Tensor | TensorPatch]
"""New values of a model's state, by the first names of `held_names`."""


def stage_weights(model: Module, weights: PolicyWeights, *, in_use: int | None) -> StagedWeights:
    """Read weights, and keep only what differs from the version in the model.

    in_use: the version in the model; None when its parameters are uninitialized.

    Raises:
        EngineError: as `read_weights`.
    """
    tensors = read_weights(model, weights)
    changed = changed_positions(model, weights, in_use=in_use)
    if changed is None:
        return tensors
    staged: dict[str, Tensor | TensorPatch] = {}
    for name, positions in changed.items():
        held, tensor = held_tensor(model, name), tensors[name]
        staged[name] = tensor
        # `copy_weights` writes through a flat view, and buffers are small.
        if isinstance(held, Parameter) and held.is_contiguous():
            at = torch.from_numpy(positions)
            values = tensor.view(-1)[at].to(held.device, held.dtype)
            staged[name] = TensorPatch(positions=at.to(held.device), values=values)
    return staged


def changed_positions(
    model: Module, weights: PolicyWeights, *, in_use: int | None
) -> dict[str, Positions] | None:
    """Return where tensors differ from the version in use; None if that is unknown.

    Returns: by the first names of `held_names`, whichever tied name was published.

    in_use: as in `stage_weights`.
    """
    changes = weights.changes
    if changes is None or changes.base_policy_version != in_use:
        return None
    positions = changes.positions
    return {
        names[0]: positions[name]
        for names in held_names(model)
        for name in names[::-1]
        if name in positions
    }


def read_weights(model: Module, weights: PolicyWeights) -> dict[str, Tensor]:
    """Return the tensors of a version, one per tensor of the model's state.

    The version may hold a tied parameter under any or all of its names, with equal values. The keys
    of the result are the first names of `held_names`. The function reads only names, shapes and
    types of the model, which may be in use in another thread.

    Raises:
        EngineError: when a tensor is missing, unknown, of another shape or not real; the message
            lists the problems.
    """
    tensors = tensors_of(weights.payload)
    names = held_names(model)
    problems = list(_problems(model, names, tensors))
    if problems:
        more = len(problems) - _MAX_PROBLEMS_SHOWN
        listed = "; ".join(problems[:_MAX_PROBLEMS_SHOWN]) + (f"; {more} more" if more > 0 else "")
        raise EngineError(f"payload: the tensors do not fit the model: {listed}")
    return {
        names_of_one[0]: next(tensors[name] for name in names_of_one if name in tensors)
        for names_of_one in names
    }


@torch.no_grad()
def copy_weights(model: Module, weights: StagedWeights) -> None:
    """Write checked weights over the model's state in place.

    Parameters are cast to their type; `copy_buffer` says what becomes of buffers.
    """
    for name, new in weights.items():
        held = held_tensor(model, name)
        if isinstance(new, TensorPatch):
            held.view(-1).index_copy_(0, new.positions, new.values)
        elif isinstance(held, Parameter):
            held.copy_(new)
        else:
            copy_buffer(held, new)


def copy_buffer(buffer: Tensor, published: Tensor) -> None:
    """Write a published buffer in the type that it has in the model, if that holds it exactly.

    If not, the buffer takes the published type. A router adds its bias in float32, and would choose
    other experts by a rounded one. Buffers by which activations are multiplied must have the type
    of these; models are trained in bfloat16, which therefore holds them exactly.
    """
    if not torch.equal(published.to(buffer.dtype).to(published.dtype), published):
        buffer.data = buffer.data.to(published.dtype)
    buffer.copy_(published)


def _problems(
    model: Module, names: list[list[str]], tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yield one line per tensor that does not fit the model."""
    for names_of_one in names:
        given = [name for name in names_of_one if name in tensors]
        if not given:
            yield f"{' or '.join(names_of_one)} is missing"
            continue
        expected = held_tensor(model, names_of_one[0])
        for name in given:
            tensor = tensors[name]
            if tensor.shape != expected.shape:
                yield f"{name} has shape {list(tensor.shape)}, not {list(expected.shape)}"
            elif expected.is_floating_point() and not tensor.is_floating_point():
                yield f"{name} is {tensor.dtype}, not a floating-point type"
            elif not expected.is_floating_point() and tensor.dtype != expected.dtype:
                yield f"{name} is {tensor.dtype}, not {expected.dtype}"
            elif name != given[0] and not torch.equal(tensor, tensors[given[0]]):
                yield f"{name} differs from {given[0]}, to which the model ties it"
    for name in sorted(tensors.keys() - {name for group in names for name in group}):
        yield f"{name} is unknown"
