"""The norm of the whole gradient, and its bound."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the L2 norm of the whole gradient to `max_norm`.

    Returns the norm before clipping. If it is NaN or infinite the gradient does not change. With
    sharded parameters every rank calls it and gets the same bits.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(
        parameter.grad for parameter in with_gradient if parameter.grad is not None
    )
    if isinstance(norm, DTensor):  # the squares of each rank's own shards: sum them
        norm = norm.full_tensor()
    if torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return float(norm)
