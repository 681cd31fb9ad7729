"""The optimizer of a policy: steps at a scaled rate, and its moments by parameter."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vcpo.spec.optimizer import Optimizer
from vcpo_learner.optimizer.algorithms import make_optimizers


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

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [float(group["lr"]) for group in self._groups()]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self, base_rate: float, scale: float = 1.0) -> None:
        """Take one step at a base learning rate multiplied by `scale`.

        Afterwards the groups have the base rate, even if the step raises, so whoever reads them
        reads the base rate. Decoupled weight decay is scaled with the rate.
        """
        _set_rates(self._groups(), base_rate)
        # torchao's step compiles itself otherwise, for minutes and with a C compiler.
        with self._scaled_rates(scale), torch.compiler.set_stance("force_eager"):
            for optimizer in self._optimizers:
                optimizer.step()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that hold each parameter's moments and step count, not copies.

        They have the parameter's placements where it is sharded, and are empty before the first
        step. Moments of 8 bits come as their parts: codes, scales.
        """
        held: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            for optimizer in self._optimizers:
                if state := optimizer.state.get(parameter):
                    held[name] = dict(chain.from_iterable(_parts(*item) for item in state.items()))
        return held

    def allocate_moments(self) -> None:
        """Make the moments of a run that has taken no step, as zeros, to be read into."""
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.step(0.0)
        self.zero_grad()
        for tensors in self.moments().values():
            if "step" in tensors:
                tensors["step"].zero_()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @contextmanager
    def _scaled_rates(self, scale: float) -> Iterator[None]:
        groups, rates = self._groups(), self.learning_rates
        try:
            for group, rate in zip(groups, rates, strict=True):
                _set_rates([group], rate * scale)
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                _set_rates([group], rate)


def _set_rates(groups: Iterable[dict[str, Any]], rate: float) -> None:
    for group in groups:
        if isinstance(group["lr"], Tensor):  # torchao accepts no other
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _parts(name: str, moment: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a moment, or the plain tensors of which its type is made, by name."""
    if isinstance(moment, DTensor) or not hasattr(moment, "__tensor_flatten__"):
        yield name, moment
        return
    for part in moment.__tensor_flatten__()[0]:
        yield f"{name}.{part}", getattr(moment, part)
