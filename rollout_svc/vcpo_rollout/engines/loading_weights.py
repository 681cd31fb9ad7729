"""Reads and checks a version's weights as a whole, then copies them into a model in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.engines.engine import EngineError, PolicyWeights
from vcpo_rollout.engines.held_state import held_names, held_tensor
from vcpo_rollout.engines.payload_tensors import tensors_of

_MAX_PROBLEMS_SHOWN = 5


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
    changes = weights.changes
    if changes is None or changes.base_policy_version != in_use:
        return tensors
    staged: dict[str, Tensor | TensorPatch] = {}
    for names in held_names(model):
        positions = next(
            (changes.positions[name] for name in names if name in changes.positions), None
        )
        if positions is None:
            continue
        held, tensor = held_tensor(model, names[0]), tensors[names[0]]
        staged[names[0]] = tensor
        # `copy_weights` writes through a flat view, and buffers are small.
        if isinstance(held, Parameter) and held.is_contiguous():
            at = torch.from_numpy(positions)
            values = tensor.view(-1)[at].to(held.device, held.dtype)
            staged[names[0]] = TensorPatch(positions=at.to(held.device), values=values)
    return staged


def changed_tensors(
    model: Module, weights: PolicyWeights, *, in_use: int | None
) -> frozenset[str] | None:
    """Return the tensors that differ from the version in use; None if that is unknown.

    Returns: the first names of `held_names`, whichever tied name was published.

    in_use: as in `stage_weights`.
    """
    changes = weights.changes
    if changes is None or changes.base_policy_version != in_use:
        return None
    return frozenset(
        names[0] for names in held_names(model) if not changes.positions.keys().isdisjoint(names)
    )


def read_weights(model: Module, weights: PolicyWeights) -> dict[str, Tensor]:
    """Return the tensors of a version, one per tensor of the model's state.

    The version may hold a tied parameter under any or all of its names, with equal values. The keys
    of the result are the first names of `held_names`. The function reads only names, shapes and
    types of the model, which may be in use in another thread.

    Raises:
        EngineError: when a tensor is missing, unknown, of another shape or not real, or the payload
            is not a safetensors file; the message lists the problems.
    """
    tensors = read_tensors(weights)
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


def read_tensors(weights: PolicyWeights) -> dict[str, Tensor]:
    """Return the tensors of a version by name, as `tensors_of`.

    Raises:
        EngineError: when the payload is not a safetensors file.
    """
    try:
        return tensors_of(weights.payload)
    except CorruptWeightsError as error:
        num_bytes = len(weights.payload)
        raise EngineError(
            f"payload: {num_bytes} bytes are not a safetensors file: {error}"
        ) from error


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
