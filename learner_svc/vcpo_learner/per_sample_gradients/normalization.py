"""The normalized input, which the weight of a normalization layer scales.

RMSNorm and LayerNorm compute weight * x, with x the normalized input. So the weight's gradient is
sum_t x_t * b_t over tokens, with b_t the gradient at the output. That reads the data twice; running
the module once per trajectory reads it many times.
"""

from weakref import WeakSet

from torch import Tensor, nn, ones_like
from torch.nn import functional

from vcpo_learner.per_sample_gradients.module_calls import ModuleCall, as_stored, is_plain

_KNOWN: WeakSet[nn.Module] = WeakSet()
"""Modules that were seen to scale each feature. A GPU would wait for the answer each time."""


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
    if isinstance(call.module, nn.LayerNorm) and is_plain(call.module, nn.LayerNorm):
        return functional.layer_norm(inputs, call.module.normalized_shape, eps=call.module.eps)
    if not _scales_each_feature(call, parameter.detach(), inputs.reshape(1, -1, len(parameter))):
        return None
    normalized: Tensor = call.repeat("weight", ones_like(parameter), {0: inputs})
    return normalized


def _scales_each_feature(call: ModuleCall, weight: Tensor, inputs: Tensor) -> bool:
    if call.module in _KNOWN:
        return True
    token = inputs[:, :1]
    powers = ones_like(weight)
    powers[1::3] = 2.0
    powers[2::3] = 4.0
    once = call.repeat("weight", ones_like(weight), {0: token})
    scaled = call.repeat("weight", powers, {0: token})
    is_known = once.shape == token.shape and bool((scaled == powers * once).all())
    if is_known:
        _KNOWN.add(call.module)
    return is_known
