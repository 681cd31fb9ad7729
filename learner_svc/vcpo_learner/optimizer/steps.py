"""AdamW from a run's settings, and the step whose rate is scaled."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vcpo.spec.optimizer import Optimizer


def make_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; vectors and scalars (norms, biases) do not decay.

    Raises: ValueError if no parameter is trainable.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("model has no parameter that requires a gradient: unfreeze some")
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def take_scaled_step(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Take one step with every group's learning rate multiplied by `scale`.

    The rates are restored even if the step raises, so schedules and checkpoints read the base rate.
    Decoupled weight decay is scaled with the rate.
    """
    with _scaled_rates(optimizer, scale):
        optimizer.step()


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clip the L2 norm of the whole gradient to `max_norm`.

    Returns the norm before clipping. If it is NaN or infinite the gradient does not change.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(
        parameter.grad for parameter in with_gradient if parameter.grad is not None
    )
    if torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return float(norm)


@contextmanager
def _scaled_rates(optimizer: torch.optim.Optimizer, scale: float) -> Iterator[None]:
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
