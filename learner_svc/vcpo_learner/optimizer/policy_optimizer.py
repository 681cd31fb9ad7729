"""The optimizer of a policy: steps at a scaled rate, and its moments by parameter."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon

from vcpo.api.learner import ALGORITHMS_OF_RANKS, Optimizer, OptimizerName
from vcpo.service.lifecycle import StartError


class PolicyOptimizer:
    """Changes the trainable parameters of a model by the algorithm of a run.

    Parameters may be sharded (`fully_shard`), before it is made.

    Raises: as `make_optimizers`.
    """

    def __init__(self, model: nn.Module, settings: Optimizer) -> None:
        self._parameters = {
            name: each for name, each in model.named_parameters() if each.requires_grad
        }
        self._optimizers = make_optimizers(model, settings)

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self, base_rate: float, scale: float = 1.0) -> None:
        """Take one step at a base learning rate multiplied by `scale`.

        Afterwards the groups have the base rate, even if the step raises, so whoever reads them
        reads the base rate. Decoupled weight decay is scaled with the rate.
        """
        try:
            self._set_learning_rate(base_rate * scale)
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            self._set_learning_rate(base_rate)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that hold each parameter's moments and step count, not copies.

        They have the parameter's placements where it is sharded, and are empty before the first
        step.
        """
        held: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            for optimizer in self._optimizers:
                if state := optimizer.state.get(parameter):
                    held[name] = dict(state)
        return held

    def allocate_moments(self, names: Collection[str] | None = None) -> None:
        """Make the moments of a run that has taken no step, as zeros, to be read into.

        names: parameters that have moments, those with a gradient so far; None for all.
        """
        for name, parameter in self._parameters.items():
            if names is None or name in names:
                parameter.grad = torch.zeros_like(parameter)
        self.step(0.0)
        self.zero_grad()
        for tensors in self.moments().values():
            if "step" in tensors:
                tensors["step"].zero_()

    def forget_moments(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _set_learning_rate(self, rate: float) -> None:
        for group in self._groups():
            group["lr"] = rate


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


def make_optimizers(model: nn.Module, settings: Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return optimizers that have each trainable parameter once.

    Vectors and scalars (norms, biases) do not decay; weight decay is decoupled from the gradient.
    """
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
