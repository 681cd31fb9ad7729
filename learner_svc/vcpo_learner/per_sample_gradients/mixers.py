"""Mixers in a recorded forward pass: layers that convolve each channel over its last tokens.

A mixer (gated delta rule, Mamba, short convolution) multiplies with the weight of a convolution
that it never calls, and with vectors of its own that have a number for each head. The convolution
gets a tap behind it. A vector is replaced, while the mixer runs, by a copy for each row, of which
every row's gradient is its trajectory's: mixers have one trajectory to a row. So are the parameters
of a linear layer that Mamba's first form never calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import modules as loaded_files
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from vcpo_learner.per_sample_gradients.module_calls import (
    CallSite,
    is_depthwise,
    is_mixer,
    replaced,
)

if TYPE_CHECKING:
    from vcpo_learner.per_sample_gradients.taps import Recording

_CONVOLVE = "causal_conv1d_fn"
"""Name, in transformers' files, of the function that convolves: a kernel's or PyTorch's."""
_ROUNDING, _HALF_ROUNDING = 1e-5, 3e-2
"""Share of the largest output."""
_BY_ROW: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a mixer takes copies by row, as it was seen to once."""


def convolution_gradients(inputs: Tensor, gradients: Tensor, size: int) -> Tensor:
    """Return the gradients [batch, channels, 1, size] of a weight.

    inputs, gradients: [batch, tokens, channels]; output t sees the inputs t - size + 1 .. t.
    """
    padded, num_tokens = functional.pad(inputs, (0, 0, size - 1, 0)), inputs.shape[1]
    products = [(gradients * padded[:, at : at + num_tokens]).sum(dim=1) for at in range(size)]
    return torch.stack(products, dim=-1)[:, :, None]


def uncalled_linear(module: nn.Module) -> nn.Linear | None:
    """Return the linear layer whose parameters a mixer uses without a call; None if it has none."""
    linear = getattr(module, "dt_proj", None)
    return linear if isinstance(linear, nn.Linear) and is_mixer(module) else None


class TappedMixer:
    """A mixer's forward with taps at its convolution and at its own vectors."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        taps: Recording,
        *,
        vectors: Sequence[str],
        forward: Callable[..., Any],
    ) -> None:
        """vectors: names of those that are trained.

        forward: with a tap at the mixer's output, for vectors that it does not take by row.
        """
        self._name = name
        self._module = module
        self._taps = taps
        self._forward = module.forward
        self._with_tap = forward
        self._has_vectors = bool(vectors)
        self._by_row: list[tuple[nn.Module, str]] = [(module, each) for each in vectors]
        if (linear := uncalled_linear(module)) is not None:
            own = linear.named_parameters()
            self._by_row += [(linear, each) for each, tensor in own if tensor.requires_grad]

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        if self._taps.is_preview:
            return self._forward(*positional, **keywords)
        states = positional[0] if positional else keywords["hidden_states"]
        copies = {each: self._copy(*each, len(states)) for each in self._by_row}
        is_by_row = bool(copies) and self._takes(copies, positional, keywords)
        tapped = {each: self._tapped(*each, copies[each]) for each in copies if is_by_row}
        forward = self._forward if is_by_row and self._has_vectors else self._with_tap
        with self._tapped_convolution(), replaced(tapped):
            return forward(*positional, **keywords)

    def _copy(self, module: nn.Module, name: str, num_rows: int) -> Tensor:
        parameter = module.get_parameter(name)
        # A mixer's own vectors meet [rows, tokens, heads]; what is beside them, as much as it has.
        shape = (1, -1) if module is self._module else parameter.shape
        return parameter.expand(num_rows, *shape)

    def _tapped(self, module: nn.Module, name: str, copy: Tensor) -> Tensor:
        site = CallSite(
            name=self._name,
            module=module,
            arguments={0: copy.shape},
            output_shape=tuple(copy.shape),
            parameter_names=[name],
            is_of_mixer=True,
        )
        tapped: Tensor = self._taps.tap(copy, site, copy.detach())
        return tapped

    @torch.no_grad()
    def _takes(self, copies: Mapping[Any, Tensor], positional: Any, keywords: Any) -> bool:
        """Whether the mixer has the same output with copies by row."""
        if self._module not in _BY_ROW:
            # Taps of modules in the mixer would count these calls.
            self._taps.is_preview = True
            try:
                once = self._forward(*positional, **keywords)
                with replaced(copies):
                    again = self._forward(*positional, **keywords)
                _BY_ROW[self._module] = _is_same(once, again)
            except (IndexError, RuntimeError, TypeError, ValueError):  # of the model's own code
                _BY_ROW[self._module] = False
            finally:
                self._taps.is_preview = False
        return _BY_ROW[self._module]

    @contextmanager
    def _tapped_convolution(self) -> Iterator[None]:
        """Put a tap behind the function that the file of the mixer's class convolves with."""
        names = vars(loaded_files[type(self._module).__module__])
        function = names.get(_CONVOLVE)
        if function is None:
            yield
            return
        names[_CONVOLVE] = self._with_convolution_tapped(function)
        try:
            yield
        finally:
            names[_CONVOLVE] = function

    def _with_convolution_tapped(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def convolve(
            hidden_states: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            activation: str | None = None,
            **keywords: Any,
        ) -> Tensor:
            """Return [batch, channels, tokens]."""
            output = function(hidden_states, weight, bias, activation=None, **keywords)
            inputs, output = hidden_states.transpose(1, 2), output.transpose(1, 2)
            for name, module in self._module.named_children():
                own = dict(module.named_parameters())
                # The function is given a view of the weight.
                if is_depthwise(module) and own["weight"].data_ptr() == weight.data_ptr():
                    site = CallSite(
                        name=f"{self._name}.{name}",
                        module=module,
                        arguments={0: inputs.shape},
                        output_shape=tuple(output.shape),
                        parameter_names=list(own),
                        is_of_mixer=True,
                    )
                    output = self._taps.tap(output, site, inputs)
            output = output.transpose(1, 2)
            return output if activation is None else ACT2FN[activation](output)

        return convolve


def _is_same(once: Any, again: Any) -> bool:
    if not isinstance(once, Tensor) or once.shape != again.shape:
        return False
    rounding = _HALF_ROUNDING if once.dtype.itemsize == 2 else _ROUNDING
    return bool((once - again).abs().max() <= rounding * once.abs().max())
