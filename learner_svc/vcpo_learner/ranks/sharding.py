"""The model on the ranks: its parameters cut over the ranks of a replica by FSDP2.

A decoder layer is gathered while it computes and released after it; embeddings, last norm and head
belong to the root and stay gathered from the first layer to the last. Parameters become DTensors,
cut along their first axis, and so do their `.grad` and the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from vcpo.service.lifecycle import StartError
from vcpo.spec.workloads import Precision
from vcpo_learner.ranks.ranks import SHARD, Communication, Ranks


def place_model(model: nn.Module, ranks: Ranks, precision: Precision) -> None:
    """Bring a model to its device, and cut it over the ranks if there are several; in place.

    model: on the CPU, or on `meta`, with the same numbers on every rank; layers that compute their
        activations again are wrapped already.
    precision: in which the model computes. Parameters, sums of gradients and optimizer stay
        float32.

    Raises:
        StartError: if the model does not name its decoder layers.
    """
    if ranks.communication is None:
        # nn.Module's own method: transformers wraps `to` without a usable type.
        nn.Module.to(model, ranks.device)
        return
    shard(model, ranks.communication, ranks, precision)


def shard(
    model: nn.Module, communication: Communication, ranks: Ranks, precision: Precision
) -> None:
    """Cut a model over the ranks of each replica, in place; as `place_model`."""
    mesh = communication.mesh if ranks.num_replicas > 1 else communication.mesh[SHARD]
    policy = MixedPrecisionPolicy()
    if precision is Precision.BFLOAT16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*decoder_layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The gradient of a batch is a sum over all trajectories; FSDP's default is the mean
            # over the ranks. With plain sums gloo and NCCL compute the same.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered one after the other, in the model's order.

    model: of transformers, or a module around one. A layer that is wrapped to compute its
        activations again is returned with its wrapper.

    Raises:
        StartError: if the model does not name them.
    """
    names = {name for module in model.modules() for name in _layer_classes(module)}
    wrapped = {id(each._checkpoint_wrapped_module) for each in _wrappers(model)}
    layers = [
        module
        for module in model.modules()
        if type(module).__name__ in names and id(module) not in wrapped
    ]
    layers += [each for each in _wrappers(model) if _wrapped_class(each) in names]
    if not layers:
        raise StartError(
            f"spec.learner: several ranks, but {type(model).__name__} does not name its decoder"
            " layers (_no_split_modules); use one rank"
        )
    return layers


def _layer_classes(module: nn.Module) -> Iterator[str]:
    yield from getattr(module, "_no_split_modules", None) or ()


def _wrappers(model: nn.Module) -> list[CheckpointWrapper]:
    return [module for module in model.modules() if isinstance(module, CheckpointWrapper)]


def _wrapped_class(wrapper: CheckpointWrapper) -> str:
    return type(wrapper._checkpoint_wrapped_module).__name__
