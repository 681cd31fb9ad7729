r"""Per-sample gradients of one layer: what a module's call adds to a parameter's gradient.

For the weight of a linear layer a call gives sum_t b_t a_t^T, with inputs a_t and output gradients
b_t; for an embedding a_t is the gradient and b_t the one-hot token. Two such sums have

    <sum_t b_t a_t^T, sum_s b'_s a'_s^T> = sum_{t,s} (b_t . b'_s) (a_t . a'_s),

so short sequences need no full gradient, only matrices of [tokens, tokens] ("ghost norm").
The weight of a normalization scales one feature each, so its gradient is sum_t b_t * x_t with x_t
the normalized input. Every other module goes through torch.func: vmap over trajectories of vjp of
the module itself.

Sources: Goodfellow, arXiv 1510.01799; Li et al., arXiv 2110.05679 (ghost norm).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, ones_like
from torch.nn import functional

from vcpo_learner.per_sample_gradients.factors import Factors, as_factor, concatenated
from vcpo_learner.per_sample_gradients.mixers import convolution_gradients
from vcpo_learner.per_sample_gradients.module_calls import (
    CallSite,
    ModuleCall,
    as_stored,
    is_plain,
)
from vcpo_learner.per_sample_gradients.slots import Slot


@dataclass(slots=True, eq=False)
class LayerGradients:
    """Per-sample gradients of one parameter from one call of its module."""

    call: ModuleCall
    parameter_name: str
    """Name of the parameter in its module."""
    parameter: Tensor
    """The parameter as the backward pass finds it in its module."""
    output_gradient: Tensor
    """[batch, ...]"""
    factors: Factors | None = None
    """The gradient of a linear layer's or an embedding's matrix; None for other parameters."""

    def gradients(self, samples: slice) -> Tensor:
        """Return the full gradients [samples, *parameter.shape]."""
        if self.factors is not None:
            return self.factors.part(samples).full(num_rows=self.parameter.shape[0])
        if self.call.site.is_of_mixer:
            gradients = self.output_gradient[samples].to(self._precise)
            if not isinstance(self.call.site.module, nn.Conv1d):
                return gradients.reshape(-1, *self.parameter.shape)
            if self.parameter.ndim == 1:
                return gradients.sum(dim=1)
            inputs = self.call.arguments[0][samples].to(self._precise)
            return convolution_gradients(inputs, gradients, self.parameter.shape[-1])
        if self.parameter_name == "bias" and self._adds_bias():
            return _per_token(self.output_gradient[samples]).sum(dim=1, dtype=self._precise)
        scaled = scaled_features(self.call, self.parameter_name, self.parameter)
        if scaled is not None and scaled.shape == self.output_gradient.shape:
            products = scaled[samples].to(self._precise) * self.output_gradient[samples]
            return _per_token(products).sum(dim=1)
        return _vjp_gradients(self, samples).to(self._precise)

    @property
    def matrix(self) -> None:
        return None

    @property
    def kind(self) -> Hashable:
        """What uses that can be joined have in common; None for a use that cannot.

        Of a call with one tensor, of a module whose form is known.
        """
        rule: Hashable = self.factors is not None
        if self.parameter_name == "bias":
            rule = "bias" if self._adds_bias() else None
        elif self.factors is None:
            rule = _RULES.get(self.call.site.module)
        inputs, output = self.call.arguments[0], self.output_gradient
        likeness = inputs.shape, inputs.dtype, output.shape, output.dtype, self._precise
        return (rule, *likeness) if rule else None

    @property
    def _precise(self) -> torch.dtype:
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def _adds_bias(self) -> bool:
        site = self.call.site
        return site.is_linear or is_plain(site.module, nn.LayerNorm)


def join(uses: Sequence[LayerGradients]) -> LayerGradients:
    """Return uses of one kind as one use, the trajectories of one after those of another."""
    first = uses[0]
    call, name = first.call, first.parameter_name
    if name != "bias":
        inputs = concatenated([use.call.arguments[0] for use in uses])
        call = ModuleCall(call.site, {0: inputs})
    gradient = concatenated([use.output_gradient for use in uses])
    factors = _factors(call, name, first.parameter, gradient)
    return LayerGradients(call, name, first.parameter, gradient, factors)


def layer_gradients(call: ModuleCall, name: str, output_gradient: Tensor) -> LayerGradients:
    """Return the gradients that `call` contributes to its module's parameter `name`.

    Raises: ValueError if the call is of an embedding whose gradient is not a sum over trajectories.
    """
    parameter: Tensor = getattr(call.site.module, name)
    factors = _factors(call, name, parameter, output_gradient)
    return LayerGradients(call, name, parameter, output_gradient, factors)


def _factors(call: ModuleCall, name: str, parameter: Tensor, gradient: Tensor) -> Factors | None:
    is_linear = call.site.is_linear
    if name != "weight" or not (is_linear or isinstance(call.site.module, nn.Embedding)):
        return None
    batch_size = len(gradient)
    if set(call.arguments) != {0} or call.arguments[0].shape[:1] != (batch_size,):
        return None
    precise = torch.promote_types(parameter.dtype, torch.float32)
    if is_linear:
        gradients = as_factor(_per_token(gradient), gradient.dtype, precise)
        inputs = as_factor(_per_token(call.arguments[0]), gradient.dtype, precise)
        return Factors(rows=gradients, columns=inputs)
    token_ids = call.arguments[0].reshape(batch_size, -1)
    gradients = _per_token(gradient).to(precise)
    scale = 1.0
    if not is_plain(call.site.module, nn.Embedding):
        scale = _embedding_scale(call, parameter.detach(), token_ids)
        if scale == 0.0:
            return None
    return _embedding_factors(call, token_ids, gradients * scale if scale != 1.0 else gradients)


def _embedding_scale(call: ModuleCall, weight: Tensor, token_ids: Tensor) -> float:
    """The number that an embedding multiplies its rows with, as Gemma's does; 0 if it is no such.

    The test is its behavior: a row of powers of two must come back multiplied exactly.
    """
    powers = torch.ones_like(weight[:1])
    powers[:, 1::3] = 2.0
    powers[:, 2::3] = 4.0
    found = call.repeat("weight", powers.expand_as(weight), {0: token_ids[:1, :1]})
    if found.shape != (1, 1, weight.shape[1]) or not bool((found == powers * found[0, 0, 0]).all()):
        return 0.0
    return float(found[0, 0, 0])


def _embedding_factors(call: ModuleCall, token_ids: Tensor, gradients: Tensor) -> Factors:
    embedding: Any = call.site.module
    if embedding.scale_grad_by_freq or embedding.max_norm is not None:
        raise ValueError(
            f"{call.site.place} has scale_grad_by_freq or max_norm: "
            "its gradient is not a sum over trajectories; turn them off"
        )
    if embedding.padding_idx is not None:
        padding = (token_ids == embedding.padding_idx)[:, :, None]
        gradients = gradients.masked_fill(padding, 0.0)
    return Factors(rows=token_ids, columns=gradients)


def _per_token(values: Tensor) -> Tensor:
    if values.ndim == 3:
        return values
    return values.reshape(len(values), -1, values.shape[-1])


def _vjp_gradients(use: LayerGradients, samples: slice) -> Tensor:
    """Gradients from running the module again on each trajectory, vectorized."""
    call, batch_size = use.call, len(use.output_gradient)
    cast = {key: as_stored(value, use.parameter.dtype) for key, value in call.arguments.items()}
    per_trajectory = {
        key: value[samples]
        for key, value in cast.items()
        if isinstance(value, Tensor) and value.shape[:1] == (batch_size,)
    }
    if not per_trajectory:
        raise ValueError(
            f"{call.site.place} has no argument with "
            f"{batch_size} entries on its first axis: gradient norms need one per trajectory"
        )

    def gradient(own: dict[int | str, Tensor], output_gradient: Tensor) -> Tensor:
        def output(parameter: Tensor) -> Any:
            arguments = cast | {key: value[None] for key, value in own.items()}
            return call.repeat(use.parameter_name, parameter, arguments)

        result, pull_back, *_ = torch.func.vjp(output, use.parameter.detach())
        pulled: Tensor = pull_back(output_gradient[None].to(result.dtype))[0]
        return pulled

    pulled: Tensor = torch.func.vmap(gradient)(per_trajectory, use.output_gradient[samples])
    return pulled


_RULES: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
"""Modules that were seen to scale each feature; equal for those that normalize alike. A GPU would
wait for the answer each time."""


def scaled_features(call: ModuleCall, name: str, parameter: Tensor) -> Tensor | None:
    """Return the normalized input [batch, ..., features]; None if the parameter is no such weight.

    Every family of models has its own class for this layer. The test is its behavior: a weight of
    powers of two must scale each feature of a token exactly.
    """
    inputs = call.arguments.get(0)
    if name != "weight" or parameter.ndim != 1 or set(call.arguments) != {0}:
        return None
    if not isinstance(inputs, Tensor) or inputs.shape[-1:] != parameter.shape:
        return None
    inputs = as_stored(inputs, parameter.dtype)
    module = call.site.module
    if isinstance(module, nn.LayerNorm) and is_plain(module, nn.LayerNorm):
        return functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
    if not _scales_each_feature(call, parameter.detach(), inputs.reshape(1, -1, len(parameter))):
        return None
    normalized: Tensor = call.repeat("weight", ones_like(parameter), {0: inputs})
    return normalized


def _scales_each_feature(call: ModuleCall, weight: Tensor, inputs: Tensor) -> bool:
    module = call.site.module
    if module in _RULES:
        return True
    token = inputs[:, :1]
    powers = ones_like(weight)
    powers[1::3] = 2.0
    powers[2::3] = 4.0
    once = call.repeat("weight", ones_like(weight), {0: token})
    scaled = call.repeat("weight", powers, {0: token})
    is_known = once.shape == token.shape and bool((scaled == powers * once).all())
    # Another parameter, such as a bias that is 0 at first, may make it wrong later.
    if is_known and len(module._parameters) == 1:
        _RULES[module] = _rule(module)
    return is_known


def known_form(site: CallSite, own: Mapping[str, Slot]) -> Hashable:
    """Return what decides, beside shapes, how a module's calls are measured; None until known.

    own: the module's slots by name.
    """
    module = site.module
    is_known = site.is_linear or module in _RULES or is_plain(module, nn.LayerNorm)
    of_each = [(name, slot.shape, getattr(module, name).dtype) for name, slot in own.items()]
    return (type(module), _RULES.get(module), *of_each) if is_known else None


def _rule(module: nn.Module) -> Hashable:
    """What tells a normalization from one that computes another thing, such as its epsilon."""
    own = {key: each for key, each in vars(module).items() if key[0] != "_" and key != "forward"}
    is_plain_data = all(isinstance(each, int | float | str | tuple) for each in own.values())
    has_more = bool(module._modules or module._buffers)
    return (type(module), repr(own)) if is_plain_data and not has_more else object()
