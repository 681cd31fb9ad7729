"""The algorithms of `spec.optimizer.name`, from libraries: a function for each.

Vectors and scalars (norms, biases) do not decay; weight decay is decoupled from the gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon

from vcpo.api.optimizer import ALGORITHMS_OF_RANKS, Optimizer, OptimizerName
from vcpo.service.lifecycle import StartError


def make_optimizers(model: nn.Module, settings: Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return optimizers that have each trainable parameter once."""
    parameters = _trainable(model)
    if not parameters:
        raise ValueError("model has no parameter that requires a gradient: unfreeze some")
    if settings.name not in ALGORITHMS_OF_RANKS and isinstance(parameters[0], DTensor):
        raise StartError(
            f"spec.optimizer.name: '{settings.name}' works with one rank only; use"
            f" {' or '.join(ALGORITHMS_OF_RANKS)}, or one rank (spec.learner.processes: 1)"
        )
    return _ALGORITHMS[settings.name](model, settings)


def _adamw(model: nn.Module, settings: Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    return (AdamW(**_adam_arguments(_trainable(model), settings)),)


def _muon(model: nn.Module, settings: Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices of the decoder layers, and AdamW for the rest.

    Muon's step is scaled to AdamW's size, so that one learning rate fits both.
    Source: arXiv 2502.16982.
    """
    outside = {id(parameter) for parameter in _vocabulary_parameters(model)}
    parameters = _trainable(model)
    matrices = [each for each in parameters if each.ndim == 2 and id(each) not in outside]
    others = [each for each in parameters if each.ndim != 2 or id(each) in outside]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        rate, decay = settings.learning_rate, settings.weight_decay
        made.append(Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        made.append(AdamW(**_adam_arguments(others, settings)))
    return tuple(made)


def _adam_arguments(parameters: Sequence[nn.Parameter], settings: Optimizer) -> dict[str, Any]:
    groups = [
        {
            "params": [each for each in parameters if each.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    return {
        "params": [group for group in groups if group["params"]],
        # One pass over memory in place of ten, and no temporary copies of a matrix.
        "fused": True,
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.epsilon,
    }


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _vocabulary_parameters(model: nn.Module) -> list[nn.Parameter]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) or each is head]
    return [parameter for each in tables for parameter in each.parameters()]


_Algorithm = Callable[[nn.Module, Optimizer], tuple[torch.optim.Optimizer, ...]]

_ALGORITHMS: Final[Mapping[OptimizerName, _Algorithm]] = {
    OptimizerName.ADAMW: _adamw,
    OptimizerName.MUON: _muon,
}
