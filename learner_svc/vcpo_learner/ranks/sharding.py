"""The model on the ranks: its parameters cut over the ranks of a replica by FSDP2.

A decoder layer is gathered while it computes and released after it; embeddings, last norm and head
belong to the root and stay gathered from the first layer to the last. Parameters become DTensors,
cut along their first axis, and so do their `.grad` and the optimizer's state.
"""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vcpo.api.workloads import Precision
from vcpo.service.lifecycle import StartError
from vcpo_learner.ranks.ranks import SHARD, Communication, Ranks


def place_model(model: nn.Module, ranks: Ranks, precision: Precision) -> None:
    """Bring a model to its device, and cut it over the ranks if there are several; in place.

    model: on the CPU, or on `meta`, with the same numbers on every rank.
    precision: in which the model computes. Parameters, sums of gradients and optimizer stay
        float32.
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


def release(model: nn.Module) -> None:
    """Release what a pass without a backward pass has left gathered: the parameters of the root.

    FSDP gathers them again only then, so without it the next pass would compute with their values
    from before an optimizer step.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


def recover(model: nn.Module) -> bool:
    """Reset a model after an error in a pass; return whether it can be used. Gradients are lost.

    Without a reset FSDP takes the next backward pass for a part of the one that failed, and
    gradients are wrong. PyTorch before 2.13 has none.
    """
    if not isinstance(model, FSDPModule):
        return True
    if not hasattr(model, "reset_iter_state"):
        return False
    model.reset_iter_state()
    return True


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ranks hold a part of a tensor each."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as a rank alone would have it; all ranks have to call it for a shared one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered one after the other, in the model's order.

    model: of transformers, or a module around one. A layer within another one is gathered with it.
    """
    names = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    layers: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in names and module not in inner:
            layers.append(module)
            inner.update(module.modules())
    if not layers:
        raise StartError(
            f"spec.learner: several ranks, but {type(model).__name__} does not name its decoder"
            " layers (_no_split_modules); use one rank"
        )
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    if uses and max(uses.values()) > 1:
        raise StartError(
            f"spec.learner: several ranks, but decoder layers of {type(model).__name__} share"
            " parameters, and each is gathered by itself; use one rank"
        )
    return layers
