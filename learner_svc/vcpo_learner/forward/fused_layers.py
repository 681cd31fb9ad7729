"""Layers whose norm, rotation and gate are single functions, in the place of their own code.

Each family of models has its own classes for them, and most of them compute the same. So modules
are chosen by their form, and keep their own forward where numbers or gradients are others.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from vcpo_learner.forward.activation_checkpointing import decoder_layers
from vcpo_learner.per_sample_gradients.mixtures import OtherForward, is_mixture
from vcpo_learner.per_sample_gradients.module_calls import replaced
from vcpo_learner.per_sample_gradients.taps import Gate, RmsNorm, Rotation, applied

_LOGGER = logging.getLogger(__name__)
_ROTATE, _ROTATED = "apply_rotary_pos_emb", ["q", "k", "cos", "sin", "unsqueeze_dim"]
"""In transformers' files, the function that rotates queries and keys, and its parameters."""
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_ROUNDING, _HALF_ROUNDING = 100, 2e-2
"""By how much two ways may differ, as a share of the largest number: times the distance of two
numbers next to each other, and in 16 bits."""
Way = Callable[..., Any]


def fuse_layers(model: nn.Module, *, is_half: bool) -> None:
    """Let the decoder layers of a model compute fused what agrees with their own code.

    is_half: whether products are in bfloat16, in which a fused gate takes a CPU longer.
    """
    found, any_parameter = Counter[str](), next(model.parameters())
    _LOGGER.info("layers: trying norms, gates and rotations as one kernel each")
    is_slow_gate = is_half and any_parameter.device.type == "cpu"
    for module in chain.from_iterable(map(_parts, decoder_layers(model))):
        fused = None if "forward" in vars(module) else _fused(module)
        if fused is None or (is_slow_gate and isinstance(fused, _Gate)):
            continue
        ways = [partial(fused.run, each) for each in (module.forward, fused)]
        found_out = (
            difference(ways, fused.shapes, any_parameter, is_half=each)
            for each in [False, True][: 1 + is_half]
        )
        reason = next(filter(None, found_out), "")
        found[f"{type(module).__name__} {f'as it is ({reason})' if reason else 'fused'}"] += 1
        if not reason:
            module.forward = fused
    if found:
        _LOGGER.info("layers: %s", ", ".join(f"{count} {each}" for each, count in found.items()))


def fuse_like(layer: nn.Module, other: nn.Module) -> None:
    """Let a layer compute fused what another one of its form does."""
    for module, its in zip(layer.modules(), other.modules(), strict=True):
        if isinstance(vars(its).get("forward"), _Fused) and (fused := _fused(module)):
            module.forward = fused


def fused_parts(model: nn.Module) -> tuple[bool, bool]:
    """Return whether all layers have a fused gate, and whether all have norms and rotation."""
    layers = [
        {type(vars(each).get("forward")) for each in layer.modules()}
        for layer in decoder_layers(model)
    ]
    in_all: set[type] = set.intersection(*layers) if layers else set()
    return _Gate in in_all and not is_mixture(model), {_Norm, _Rotation} <= in_all


class _Norm:
    """The forward of a module with a vector and an epsilon."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        self.shapes = (2, 3, module.weight.numel()), (module.weight.numel(),)

    @staticmethod
    def is_like(module: nn.Module) -> bool:
        own = [(name, each.ndim) for name, each in module.named_parameters()]
        has_epsilon = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
        return own == [("weight", 1)] and has_epsilon and _takes_one(module)

    def __call__(self, hidden_states: Tensor) -> Any:
        given = hidden_states, self._module.weight, self._eps
        return RmsNorm.apply(*given)  # type: ignore[no-untyped-call]

    def tapped(self, hidden_states: Tensor, *place: Any) -> Any:
        """Return the output with its tap; place: as that of a tap."""
        return applied(RmsNorm, hidden_states, self._module.weight, self._eps, *place)

    def run(self, forward: Way, inputs: Tensor, weight: Tensor) -> Any:
        with replaced({(self._module, "weight"): weight}):
            return forward(inputs)


class _Gate:
    """The forward of a module with three matrices and an activation."""

    shapes = ((2, 3, 16),)

    def __init__(self, module: Any) -> None:
        self._module = module

    @staticmethod
    def is_like(module: nn.Module) -> bool:
        children = {name for name, _ in module.named_children()} - {"act_fn"}
        return children == {*_MATRICES} and not module._parameters and _takes_one(module)

    def __call__(self, hidden_states: Tensor) -> Any:
        module = self._module
        gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        return module.down_proj(applied(Gate, gate, up))

    def run(self, forward: Way, inputs: Tensor) -> Any:
        with ExitStack() as stack:
            for shift, name in enumerate(_MATRICES, 1):
                turn = partial(torch.roll, shifts=shift, dims=-1)
                stack.callback(OtherForward(getattr(self._module, name), turn).remove)
            return forward(inputs)


class _Rotation:
    """An attention's own forward, with another function that rotates."""

    shapes = (2, 4, 3, 16), (2, 2, 3, 16)

    def __init__(self, module: Any) -> None:
        forward = type(module).forward
        names = dict(forward.__globals__)
        self._own, names[_ROTATE] = names[_ROTATE], self._rotate
        self._forward = FunctionType(forward.__code__, names, argdefs=forward.__defaults__)
        self._forward.__kwdefaults__ = forward.__kwdefaults__
        self._module = module

    @staticmethod
    def is_like(module: nn.Module) -> bool:
        forward: Any = type(module).forward
        if not inspect.isfunction(forward) or _ROTATE not in forward.__code__.co_names:
            return False
        rotate = forward.__globals__.get(_ROTATE)
        is_known = rotate is not None and [*inspect.signature(rotate).parameters] == _ROTATED
        return is_known and not (forward.__closure__ or module._parameters)

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        return self._forward(self._module, *positional, **keywords)

    def _rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Any:
        if cos.shape[-1] != q.shape[-1]:  # of a part of each head
            return self._own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        angles = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return applied(Rotation, q, k, *angles)

    def run(self, forward: Way, query: Tensor, key: Tensor) -> Any:
        rotate = self._rotate if forward is self else self._own
        return rotate(query, key, query[:, 0].detach().sin(), key[:, 0].detach().cos())


_KINDS = _Norm, _Gate, _Rotation
_Fused = _Norm | _Gate | _Rotation


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer but those in a module with parameters, which norms may run again."""
    yield module
    if not any(True for _ in module.parameters(recurse=False)):
        for child in module.children():
            yield from _parts(child)


def _fused(module: nn.Module) -> _Fused | None:
    return next((kind(module) for kind in _KINDS if kind.is_like(module)), None)


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def difference(
    ways: Sequence[Way], shapes: Sequence[Sequence[int]], like: Tensor, *, is_half: bool
) -> str:
    """Return how two functions of tensors differ; empty if outputs and gradients are the same.

    shapes: of the tensors, which are of the type of `like`, and on its device.
    """
    device, dtype = torch.device("cpu") if like.is_meta else like.device, like.dtype
    generator = torch.Generator(device).manual_seed(0)
    given = [torch.randn(each, generator=generator, device=device).to(dtype) for each in shapes]
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half), torch.enable_grad():
            numbers = [_numbers(each, given) for each in ways]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of a model's own code, or a kernel is not made
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    is_exact = not is_half and dtype.itemsize > 2
    rounding = _ROUNDING * torch.finfo(dtype).eps if is_exact else _HALF_ROUNDING
    is_same = all(
        own.shape == other.shape and bool((own - other).abs().max() <= rounding * own.abs().max())
        for own, other in zip(*numbers, strict=True)
    )
    return "" if is_same else "other numbers"


def _numbers(way: Way, given: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a function of tensors, and the gradients of what is given."""
    inputs = [each.clone().requires_grad_() for each in given]
    found = way(*inputs)
    outputs = [found] if isinstance(found, Tensor) else [*found]
    return [*outputs, *torch.autograd.grad([each.square().sum() for each in outputs], inputs)]
