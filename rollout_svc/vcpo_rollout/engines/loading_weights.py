"""Reads and checks a version's weights as a whole, then copies them into a model in place.

A version in shards is not joined: its rows are copied from where they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.engines.engine import EngineError, PolicyWeights
from vcpo_rollout.engines.payload_tensors import (
    WholeTensor,
    elements_at,
    joined,
    whole_shape,
    whole_tensors,
)

_MAX_PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPatch:
    """New values of some elements of a parameter, with its dtype and on its device."""

    positions: Tensor
    """Positions in the flat parameter, [num_changes], int64."""
    values: Tensor
    """[num_changes]."""


StagedWeights = Mapping[str, Tensor | WholeTensor | TensorPatch]
"""New values of a model's parameters, by the names of `model.named_parameters()`."""


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
    staged: dict[str, WholeTensor | TensorPatch] = {}
    for names in _names_by_parameter(model):
        positions = next(
            (changes.positions[name] for name in names if name in changes.positions), None
        )
        if positions is None:
            continue
        parameter, tensor = model.get_parameter(names[0]), tensors[names[0]]
        staged[names[0]] = tensor
        if parameter.is_contiguous():  # `copy_weights` writes through a flat view
            at = torch.from_numpy(positions)
            values = elements_at(tensor, at).to(parameter.device, parameter.dtype)
            staged[names[0]] = TensorPatch(positions=at.to(parameter.device), values=values)
    return staged


def changed_parameters(
    model: Module, weights: PolicyWeights, *, in_use: int | None
) -> frozenset[str] | None:
    """Return the parameters that differ from the version in use; None if that is unknown.

    Returns: names as in `model.named_parameters()`, whichever tied name was published.

    in_use: as in `stage_weights`.
    """
    changes = weights.changes
    if changes is None or changes.base_policy_version != in_use:
        return None
    return frozenset(
        names[0]
        for names in _names_by_parameter(model)
        if not changes.positions.keys().isdisjoint(names)
    )


def read_weights(model: Module, weights: PolicyWeights) -> dict[str, WholeTensor]:
    """Return the tensors of a version, one per parameter of the model.

    The version may hold a tied parameter under any or all of its names, with equal values. The keys
    of the result are those of `model.named_parameters()`. The function reads only names and shapes
    of the model, which may be in use in another thread.

    Raises:
        EngineError: when a tensor is missing, unknown, of another shape or not real, or a payload
            is not a safetensors file; the message lists the problems.
    """
    tensors = read_tensors(weights)
    names = _names_by_parameter(model)
    problems = list(_problems(model, names, tensors))
    if problems:
        more = len(problems) - _MAX_PROBLEMS_SHOWN
        listed = "; ".join(problems[:_MAX_PROBLEMS_SHOWN]) + (f"; {more} more" if more > 0 else "")
        raise EngineError(f"payload: the tensors do not fit the model: {listed}")
    return {
        names_of_one[0]: next(tensors[name] for name in names_of_one if name in tensors)
        for names_of_one in names
    }


def read_tensors(weights: PolicyWeights) -> dict[str, WholeTensor]:
    """Return the tensors of a version by name, as `whole_tensors`.

    Raises:
        EngineError: when a payload is not a safetensors file.
    """
    try:
        return whole_tensors(weights)
    except CorruptWeightsError as error:
        num_bytes = sum(len(shard.payload) for shard in weights.shards)
        raise EngineError(
            f"payload: {num_bytes} bytes are not a safetensors file: {error}"
        ) from error


@torch.no_grad()
def copy_weights(model: Module, weights: StagedWeights) -> None:
    """Write checked weights over the parameters in place, cast to their dtype."""
    for name, new in weights.items():
        parameter = model.get_parameter(name)
        if isinstance(new, TensorPatch):
            parameter.view(-1).index_copy_(0, new.positions, new.values)
        elif isinstance(new, Tensor) or len(new) == 1:
            parameter.copy_(new if isinstance(new, Tensor) else new[0].rows)
        else:
            for part in new:
                parameter.narrow(0, part.first_row, len(part.rows)).copy_(part.rows)


def _names_by_parameter(model: Module) -> list[list[str]]:
    """Return all names of each parameter; `named_parameters` gives the first one."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return list(names.values())


def _problems(
    model: Module, names: list[list[str]], tensors: Mapping[str, WholeTensor]
) -> Iterator[str]:
    """Yield one line per tensor that does not fit the model."""
    for names_of_one in names:
        given = [name for name in names_of_one if name in tensors]
        if not given:
            yield f"{' or '.join(names_of_one)} is missing"
            continue
        expected = model.get_parameter(names_of_one[0])
        for name in given:
            tensor = tensors[name]
            shape, dtype = whole_shape(tensor), tensor[0].rows.dtype
            if shape != tuple(expected.shape):
                yield f"{name} has shape {list(shape)}, not {list(expected.shape)}"
            elif not dtype.is_floating_point:
                yield f"{name} is {dtype}, not a floating-point type"
            elif name != given[0] and not torch.equal(joined(tensor), joined(tensors[given[0]])):
                yield f"{name} differs from {given[0]}, to which the model ties it"
    for name in sorted(tensors.keys() - {name for group in names for name in group}):
        yield f"{name} is unknown"
