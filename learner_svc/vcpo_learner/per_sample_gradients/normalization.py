"""What the weight of a normalization layer scales.

RMSNorm and LayerNorm compute weight * x with x the normalized input, so that the weight's gradient
is sum_t x_t * b_t over tokens, b_t being the gradient at the output: two passes over the data,
where running the module once per trajectory takes many.
"""

from torch import Tensor, nn, ones_like
from torch.nn import functional

from vcpo_learner.per_sample_gradients.hooks import ModuleCall, as_stored, is_plain


def scaled_features(call: ModuleCall, name: str, parameter: nn.Parameter) -> Tensor | None:
    """The normalized input [batch, ..., features], or None where the parameter does something else.

    Every family of models has a class of its own for this. They are told by what they do: a weight
    of powers of two must scale the features of a token exactly, each by its own.
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
    normalized: Tensor = call.repeated("weight", ones_like(parameter), {0: inputs})
    return normalized


def _scales_each_feature(call: ModuleCall, weight: Tensor, inputs: Tensor) -> bool:
    token = inputs[:, :1]
    powers = ones_like(weight)
    powers[1::3] = 2.0
    powers[2::3] = 4.0
    once = call.repeated("weight", ones_like(weight), {0: token})
    scaled = call.repeated("weight", powers, {0: token})
    return once.shape == token.shape and bool((scaled == powers * once).all())
