"""Mixtures of experts in a recorded forward pass: taps where tokens meet a parameter.

The modules of a mixture have no tensor with one entry for each token: a router returns several
tensors, and an expert sees the tokens that were sent to it. So it is not their outputs that are
tapped, but the products of their parameters with tokens. They compute what they always compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vcpo_learner.per_sample_gradients.experts import ExpertSite
from vcpo_learner.per_sample_gradients.module_calls import CallSite, is_plain

if TYPE_CHECKING:
    from vcpo_learner.per_sample_gradients.taps import Recording

_EXPERT_MATRICES = {"gate_up_proj", "up_proj", "down_proj"}


def tapped_forward(name: str, module: nn.Module, taps: Recording) -> Callable[..., Any] | None:
    """Return the forward of a router or of experts with taps in it; None for any other module.

    name: of the module in its model.
    """
    if is_plain(module, nn.Linear):
        return None
    if is_router(module):
        own = module.forward

        def forward(*arguments: Any, **keywords: Any) -> Any:
            with _LinearTaps(name, module, taps):
                return own(*arguments, **keywords)

        return forward
    if is_experts(module):
        return _TappedExperts(name, module, taps)
    return None


def is_router(module: nn.Module) -> bool:
    """Return whether a module sends tokens to experts by products with its own weight."""
    if not hasattr(module, "top_k"):
        return False
    own = dict(module.named_parameters(recurse=False))
    is_matrix = "weight" in own and own["weight"].ndim == 2
    return is_matrix and not is_plain(module, nn.Linear)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is the experts of a layer, as transformers stores them.

    Its decorator `use_experts_implementation` gives the class the gate, and says that each way to
    compute it may replace another. Biases are not known here.
    """
    if not hasattr(module, "_apply_gate"):
        return False
    own = dict(module.named_parameters(recurse=False))
    return bool(own) and all(
        name in _EXPERT_MATRICES and each.ndim == 3 for name, each in own.items()
    )


def is_mixture(model: nn.Module) -> bool:
    """Return whether a model has layers whose experts are one tensor, those with biases too."""
    return any(
        each.ndim == 3 and name.rpartition(".")[2] in _EXPERT_MATRICES
        for name, each in model.named_parameters()
    )


class OtherForward:
    """A forward in the place of a module's own, until it is removed."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._before = vars(module).get("forward")
        # As an assignment, without a search of the module's parameters.
        vars(module)["forward"] = forward

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._before is None:
            del vars(self._module)["forward"]
        else:
            vars(self._module)["forward"] = self._before


class _LinearTaps(TorchFunctionMode):
    """Puts taps behind the linear layers that use a module's own weight."""

    def __init__(self, name: str, module: nn.Module, taps: Recording) -> None:
        super().__init__()
        self._name = name
        self._module = module
        self._taps = taps

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        is_own = func is functional.linear and args[1] is self._module.get_parameter("weight")
        if not is_own:
            return output
        inputs = args[0]
        site = CallSite(
            name=self._name,
            module=self._module,
            arguments={0: inputs.shape},
            output_shape=tuple(output.shape),
            parameter_names=[name for name, _ in self._module.named_parameters(recurse=False)],
            is_linear=True,
        )
        return self._taps.tap(output, site, inputs)


class _TappedExperts:
    """The forward of a layer's experts, one after the other, with a tap behind their products."""

    def __init__(self, name: str, module: nn.Module, taps: Recording) -> None:
        self._place = f"module {name!r} ({type(module).__name__})"
        self._module: Any = module
        self._taps = taps

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [tokens, features]; top_k_index, top_k_weights: [tokens, experts of a token]."""
        experts = self._module
        matrices = experts.gate_up_proj if experts.has_gate else experts.up_proj
        chosen, order = torch.sort(top_k_index.flatten(), stable=True)
        tokens = order // top_k_index.shape[1]
        num_pairs = torch.bincount(chosen, minlength=len(matrices)).tolist()
        site = ExpertSite(
            place=self._place,
            module=experts,
            parameter_name="gate_up_proj" if experts.has_gate else "up_proj",
            is_transposed=experts.is_transposed,
            num_pairs=num_pairs,
            num_tokens=len(hidden_states),
        )
        outer = self._products(site, hidden_states[tokens], tokens)
        inner = experts._apply_gate(outer) if experts.has_gate else experts.act_fn(outer)
        outputs = self._products(site.of("down_proj"), inner, tokens)
        weighted = outputs * top_k_weights.flatten()[order, None]
        by_token = torch.empty_like(weighted).index_copy(0, order, weighted)
        total = by_token.view(*top_k_index.shape, -1).sum(dim=1)
        return total.to(hidden_states.dtype)

    def _products(self, site: ExpertSite, inputs: Tensor, tokens: Tensor) -> Tensor:
        """Each expert's matrix times its part of `inputs` [pairs, features], with a tap."""
        matrices = self._module.get_parameter(site.parameter_name).unbind()
        parts = zip(torch.split(inputs, list(site.num_pairs)), matrices, strict=True)
        output = torch.cat(
            [
                part @ matrix if site.is_transposed else functional.linear(part, matrix)
                for part, matrix in parts
            ]
        )
        tapped: Tensor = self._taps.tap(output, site, inputs, tokens)
        return tapped
