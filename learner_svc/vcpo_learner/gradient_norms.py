r"""Exact squared gradient norm of every trajectory, from one batched backward pass.

Problem. The optimal baseline weighs trajectory i by n_i = ||grad f_i||^2. A backward pass of
sum_i f_i gives the sum of the gradients; one pass for each i is exact, but slow.

Way. A module applied to a batch meets parameter p once for each trajectory, so that grad_p f_i is a
function of the module's inputs and of the gradient at its outputs, both in trajectory i alone:

    forward    every module that owns a trainable parameter is recorded: arguments, output
    backward   one pass, down to the recorded outputs and no further (no parameter gradients)
    norms      grad_p f_i = sum over the calls that use p of the call's vector-Jacobian product

The sum over calls stands inside the norm: a tied embedding, or a module called twice, has one
gradient. For the weight of a linear layer a call gives sum_t b_t a_t^T, with inputs a_t and output
gradients b_t; for an embedding a_t is the gradient and b_t the one-hot token. Two such sums have

    <sum_t b_t a_t^T, sum_s b'_s a'_s^T> = sum_{t,s} (b_t . b'_s) (a_t . a'_s),

so that short sequences need no gradient in full, only matrices of [tokens, tokens] ("ghost norm").
Every other module goes through torch.func: vmap over trajectories of vjp of the module itself.

Memory. Beyond activations and their gradients: for one parameter at a time, gradients or token
matrices of as many trajectories as fit `_CHUNK_ELEMENTS` numbers, and of one trajectory at least.

Limits. Trajectories must not meet within a module (batch normalization). A parameter that is used
outside the forward of the module that owns it goes unseen. An argument whose first axis happens to
be as long as the batch is taken for per-trajectory data. What can be noticed raises ValueError.

Sources: Goodfellow, arXiv 1510.01799; Li et al., arXiv 2110.05679 (ghost norm); Bu et al.,
arXiv 2205.10683 (the choice between the two forms).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from vcpo_learner.module_calls import ModuleCall, own_trainable_parameters

_CHUNK_ELEMENTS = 1 << 25
"""Numbers held for one parameter at a time; 128 MiB in float32."""


def squared_gradient_norms(
    model: nn.Module,
    objectives: Tensor,
    calls: Sequence[ModuleCall],
    *,
    retain_graph: bool = False,
) -> Tensor:
    """Squared L2 norm of each objective's gradient over all trainable parameters.

    objectives: [batch] one number per trajectory, made from `calls` of this model and with the
        trajectories in the order of the batch.
    retain_graph: keep the graph for another backward pass through `objectives`.
    Returns: [batch] float64, at least 0; entries are as exact as the parameters' number type.
    The parameters' `.grad` is neither read nor written.
    Raises: ValueError, naming the module or parameter, when a call's first axis is not the batch, a
    recorded tensor was changed in place, or a trainable parameter was in no call.
    """
    for call in calls:
        call.require_per_trajectory(len(objectives))
    gradients = torch.autograd.grad(
        objectives.sum(),
        [call.output for call in calls],
        retain_graph=retain_graph,
        materialize_grads=True,
    )
    with torch.no_grad():
        total = torch.zeros(len(objectives), dtype=torch.float64, device=objectives.device)
        for uses in _uses_by_parameter(model, calls, gradients):
            total += _squared_norms(uses, len(objectives))
    return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Use:
    """What one call has to do with one parameter."""

    call: ModuleCall
    parameter_name: str
    """As the module calls it."""
    parameter: nn.Parameter
    output_gradient: Tensor
    """[batch, ...]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Factors:
    """The gradient of a matrix as a sum of outer products over tokens."""

    rows: Tensor
    """[batch, tokens, num_rows], or int64 [batch, tokens] for one-hot rows."""
    columns: Tensor
    """[batch, tokens, num_columns]"""

    def part(self, samples: slice) -> "_Factors":
        return _Factors(rows=self.rows[samples], columns=self.columns[samples])


def _uses_by_parameter(
    model: nn.Module, calls: Sequence[ModuleCall], gradients: Sequence[Tensor]
) -> list[list[_Use]]:
    uses: dict[nn.Parameter, list[_Use]] = {}
    for call, gradient in zip(calls, gradients, strict=True):
        for name, parameter in own_trainable_parameters(call.module).items():
            use = _Use(
                call=call, parameter_name=name, parameter=parameter, output_gradient=gradient
            )
            uses.setdefault(parameter, []).append(use)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in uses:
            raise ValueError(
                f"parameter {name!r} is trainable, but its module was not called: gradient norms "
                "cannot see how it is used; freeze it, or call the module that owns it"
            )
    return list(uses.values())


def _squared_norms(uses: Sequence[_Use], batch_size: int) -> Tensor:
    """Squared norms [batch] of one parameter's gradients, summed over its uses first."""
    num_elements = uses[0].parameter.numel()
    factors = [_factors(use) for use in uses]
    factored = [found for found in factors if found is not None]
    most_tokens = max((found.columns.shape[1] for found in factored), default=0)
    # Both forms are exact; this is where their arithmetic breaks even (arXiv 2205.10683).
    ghost = len(factored) == len(uses) and 2 * most_tokens**2 <= num_elements
    size = max(1, _CHUNK_ELEMENTS // (most_tokens**2 if ghost else num_elements))
    chunks = []
    for start in range(0, batch_size, size):
        samples = slice(start, start + size)
        if ghost:
            chunks.append(_ghost_norms(factored, samples))
        else:
            chunks.append(_full_norms(uses, factors, samples))
    return torch.cat(chunks)


def _ghost_norms(factors: Sequence[_Factors], samples: slice) -> Tensor:
    parts = [found.part(samples) for found in factors]
    total = sum(_inner_products(first, second) for first, second in product(parts, parts))
    assert isinstance(total, Tensor)
    # Rounding may leave the square of a vanishing gradient just under zero.
    return total.clamp_min(0.0)


def _full_norms(uses: Sequence[_Use], factors: Sequence[_Factors | None], samples: slice) -> Tensor:
    pairs = zip(uses, factors, strict=True)
    gradients = [_gradients(use, found, samples) for use, found in pairs]
    total = torch.stack(gradients).sum(dim=0) if len(gradients) > 1 else gradients[0]
    return total.flatten(1).square().sum(dim=1, dtype=torch.float64)


def _inner_products(first: _Factors, second: _Factors) -> Tensor:
    """Inner products [batch] of two factored gradients."""
    columns = first.columns @ second.columns.mT
    return (columns * _row_products(first.rows, second.rows)).sum(dim=(1, 2), dtype=torch.float64)


def _row_products(first: Tensor, second: Tensor) -> Tensor:
    """Products [batch, tokens of first, tokens of second] of rows, one-hot or not."""
    match first.is_floating_point(), second.is_floating_point():
        case True, True:
            return first @ second.mT
        case True, False:
            return first.gather(2, second[:, None, :].expand(-1, first.shape[1], -1))
        case False, True:
            return _row_products(second, first).mT
        case _:
            return first[:, :, None] == second[:, None, :]


def _factors(use: _Use) -> _Factors | None:
    """The gradient of a linear layer's or an embedding's matrix as factors; None for all else."""
    module, arguments = use.call.module, use.call.arguments
    is_linear = _is_plain(module, nn.Linear)
    if use.parameter_name != "weight" or not (is_linear or _is_plain(module, nn.Embedding)):
        return None
    batch_size = len(use.output_gradient)
    if set(arguments) != {0} or arguments[0].shape[:1] != (batch_size,):
        return None
    gradients = _per_token(use.output_gradient, use.parameter.dtype)
    if is_linear:
        inputs = _per_token(arguments[0].detach(), use.parameter.dtype)
        return _Factors(rows=gradients, columns=inputs)
    return _embedding_factors(use.call, arguments[0].reshape(batch_size, -1), gradients)


def _embedding_factors(call: ModuleCall, token_ids: Tensor, gradients: Tensor) -> _Factors:
    embedding = call.module
    if embedding.scale_grad_by_freq or embedding.max_norm is not None:
        raise ValueError(
            f"{call.place} has scale_grad_by_freq or max_norm: "
            "its gradient is not a sum over trajectories; turn them off"
        )
    if embedding.padding_idx is not None:
        padding = (token_ids == embedding.padding_idx)[:, :, None]
        gradients = gradients.masked_fill(padding, 0.0)
    return _Factors(rows=token_ids, columns=gradients)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what `kind` does; a subclass with a forward of its own may not."""
    return type(module).forward is kind.forward


def _per_token(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [batch, ..., features] as [batch, tokens, features]."""
    return values.reshape(len(values), -1, values.shape[-1]).to(dtype)


def _gradients(use: _Use, factors: _Factors | None, samples: slice) -> Tensor:
    """Gradients [samples, *parameter.shape] of one use, in full."""
    if factors is not None:
        return _outer_sum(factors.part(samples), num_rows=use.parameter.shape[0])
    if use.parameter_name == "bias" and _is_plain(use.call.module, nn.Linear):
        return _per_token(use.output_gradient[samples], use.parameter.dtype).sum(dim=1)
    return _pulled_back(use, samples)


def _outer_sum(factors: _Factors, num_rows: int) -> Tensor:
    if factors.rows.is_floating_point():
        return factors.rows.mT @ factors.columns
    count, num_columns = len(factors.rows), factors.columns.shape[-1]
    offsets = torch.arange(count, device=factors.rows.device)[:, None] * num_rows
    flat = factors.columns.new_zeros(count * num_rows, num_columns)
    flat.index_add_(0, (factors.rows + offsets).flatten(), factors.columns.flatten(0, 1))
    return flat.view(count, num_rows, num_columns)


def _pulled_back(use: _Use, samples: slice) -> Tensor:
    """Gradients by running the module again on one trajectory at a time, vectorized."""
    call, batch_size = use.call, len(use.output_gradient)
    cast = {key: _as_stored(value, use.parameter.dtype) for key, value in call.arguments.items()}
    per_trajectory = {
        key: value[samples]
        for key, value in cast.items()
        if isinstance(value, Tensor) and value.shape[:1] == (batch_size,)
    }
    if not per_trajectory:
        raise ValueError(
            f"{call.place} has no argument with "
            f"{batch_size} entries on its first axis: gradient norms need one per trajectory"
        )

    def gradient(own: dict[int | str, Tensor], output_gradient: Tensor) -> Tensor:
        def output(parameter: Tensor) -> Any:
            arguments = cast | {key: value[None] for key, value in own.items()}
            return call.repeated(use.parameter_name, parameter, arguments)

        result, pull_back, *_ = torch.func.vjp(output, use.parameter.detach())
        pulled: Tensor = pull_back(output_gradient[None].to(result.dtype))[0]
        return pulled

    pulled: Tensor = torch.func.vmap(gradient)(per_trajectory, use.output_gradient[samples])
    return pulled


def _as_stored(value: Any, dtype: torch.dtype) -> Any:
    """An argument without its graph, and, if autocast made it smaller, in the parameters' type."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(dtype) if value.is_floating_point() else value
