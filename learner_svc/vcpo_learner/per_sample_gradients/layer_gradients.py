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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.hooks import ModuleCall, as_stored, is_plain
from vcpo_learner.per_sample_gradients.normalization import scaled_features

_PROBED_FEATURES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factors:
    """The gradient of a matrix as a sum of outer products over tokens."""

    rows: Tensor
    """[batch, tokens, num_rows], or int64 [batch, tokens] for one-hot rows."""
    columns: Tensor
    """[batch, tokens, num_columns]"""

    def part(self, samples: slice) -> "Factors":
        """Return the factors of some trajectories."""
        return Factors(rows=self.rows[samples], columns=self.columns[samples])

    def inner_products(self, other: "Factors", products: "TokenProducts") -> Tensor:
        """Return inner products [batch] float64 with another factored gradient of the matrix."""
        if not (self.rows.is_floating_point() and other.rows.is_floating_point()):
            columns = products.of(self.columns, other.columns)
            rows = _row_products(self.rows, other.rows).to(columns.dtype)
            return _sums_of_products(rows, columns)
        if self.rows.shape[-1] < self.columns.shape[-1]:
            return _bilinear(self.rows @ other.rows.mT, self.columns, other.columns)
        return _bilinear(products.of(self.columns, other.columns), self.rows, other.rows)

    def full(self, num_rows: int) -> Tensor:
        """Return the full gradients, [batch, num_rows, num_columns]."""
        if self.rows.is_floating_point():
            return self.rows.mT @ self.columns
        count, num_columns = len(self.rows), self.columns.shape[-1]
        offsets = torch.arange(count, device=self.rows.device)[:, None] * num_rows
        flat = self.columns.new_zeros(count * num_rows, num_columns)
        flat.index_add_(0, (self.rows + offsets).flatten(), self.columns.flatten(0, 1))
        return flat.view(count, num_rows, num_columns)

    def add_weighted_to(self, total: Tensor, coefficients: Tensor) -> None:
        """Add sum_i c_i G_i to `total` [num_rows, num_columns], as one product over all tokens."""
        rows, columns, factor = self.rows, self.columns, coefficients[:, None, None]
        if rows.is_floating_point() and rows.shape[-1] < columns.shape[-1]:
            rows = rows * factor
        else:
            columns = columns * factor
        if rows.is_floating_point():
            total.addmm_(rows.flatten(0, 1).T, columns.flatten(0, 1))
        else:
            total.index_add_(0, rows.flatten(), columns.flatten(0, 1))


@dataclass(slots=True, eq=False)
class TokenProducts:
    """Products of tokens with tokens; keeps the last one, as neighboring layers share inputs."""

    _last: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, first: Tensor, second: Tensor) -> Tensor:
        """Return [batch, tokens of first, tokens of second]; both are [batch, tokens, features]."""
        if self._last is not None and _is_same(first, self._last[0], second, self._last[1]):
            return self._last[2]
        # The factors are held too, so that no other tensor can reuse their memory.
        self._last = (first, second, first @ second.mT)
        return self._last[2]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerGradients:
    """Per-sample gradients of one parameter from one call of its module."""

    call: ModuleCall
    parameter_name: str
    """In its module."""
    parameter: nn.Parameter
    output_gradient: Tensor
    """[batch, ...]"""
    factors: Factors | None
    """The gradient of a linear layer's or an embedding's matrix; None for other parameters."""

    def gradients(self, samples: slice) -> Tensor:
        """Return the full gradients [samples, *parameter.shape]."""
        if self.factors is not None:
            return self.factors.part(samples).full(num_rows=self.parameter.shape[0])
        if self.parameter_name == "bias" and self._adds_bias():
            return _per_token(self.output_gradient[samples], self.parameter.dtype).sum(dim=1)
        scaled = scaled_features(self.call, self.parameter_name, self.parameter)
        if scaled is not None and scaled.shape == self.output_gradient.shape:
            return _per_token(scaled[samples] * self.output_gradient[samples], scaled.dtype).sum(1)
        return _vjp_gradients(self, samples)

    def _adds_bias(self) -> bool:
        """Whether the module adds its bias to each token."""
        return is_plain(self.call.module, nn.Linear) or is_plain(self.call.module, nn.LayerNorm)


def layer_gradients(
    call: ModuleCall, name: str, parameter: nn.Parameter, output_gradient: Tensor
) -> LayerGradients:
    """Return the gradients that `call` contributes to its module's parameter `name`.

    Raises: ValueError if the call is of an embedding whose gradient is not a sum over trajectories.
    """
    factors = None
    if name == "weight":
        factors = _factors(call, parameter, output_gradient)
    return LayerGradients(
        call=call,
        parameter_name=name,
        parameter=parameter,
        output_gradient=output_gradient,
        factors=factors,
    )


def _factors(call: ModuleCall, parameter: nn.Parameter, gradient: Tensor) -> Factors | None:
    is_linear = is_plain(call.module, nn.Linear)
    if not (is_linear or is_plain(call.module, nn.Embedding)):
        return None
    batch_size = len(gradient)
    if set(call.arguments) != {0} or call.arguments[0].shape[:1] != (batch_size,):
        return None
    gradients = _per_token(gradient, parameter.dtype)
    if is_linear:
        inputs = _per_token(call.arguments[0].detach(), parameter.dtype)
        first = _first_busy_token(gradients)
        return Factors(rows=gradients[:, first:], columns=inputs[:, first:])
    return _embedding_factors(call, call.arguments[0].reshape(batch_size, -1), gradients)


def _embedding_factors(call: ModuleCall, token_ids: Tensor, gradients: Tensor) -> Factors:
    embedding = call.module
    if embedding.scale_grad_by_freq or embedding.max_norm is not None:
        raise ValueError(
            f"{call.place} has scale_grad_by_freq or max_norm: "
            "its gradient is not a sum over trajectories; turn them off"
        )
    if embedding.padding_idx is not None:
        padding = (token_ids == embedding.padding_idx)[:, :, None]
        gradients = gradients.masked_fill(padding, 0.0)
    return Factors(rows=token_ids, columns=gradients)


def _first_busy_token(gradients: Tensor) -> int:
    """The first token of [batch, tokens, features] with a gradient; the last if none has one.

    The prompts' tokens have none in the head and in most of the last layer.
    """
    # First a few features of all tokens, then all features of the remaining tokens.
    bound = _first_nonzero(gradients[..., :_PROBED_FEATURES])
    return _first_nonzero(gradients[:, : bound + 1])


def _first_nonzero(values: Tensor) -> int:
    """First token of [batch, tokens, features] that is not 0 everywhere; the last if all are."""
    is_busy = values.abs().amax(dim=2).any(dim=0)
    is_busy[-1] = True
    return int(is_busy.int().argmax())


def _row_products(first: Tensor, second: Tensor) -> Tensor:
    """Products [batch, tokens of first, tokens of second] of rows, of which one is one-hot."""
    match first.is_floating_point(), second.is_floating_point():
        case True, False:
            return first.gather(2, second[:, None, :].expand(-1, first.shape[1], -1))
        case False, True:
            return _row_products(second, first).mT
        case _:
            return first[:, :, None] == second[:, None, :]


def _bilinear(kernel: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """sum_ts k_ts a_t . b_s of each trajectory, [batch] float64.

    kernel: [batch, T, S]; first, second: [batch, T or S, features].

    A CPU multiplies the kernel with b, one trajectory at a time, into memory that stays in its
    caches; products of a with b would need a transposition first. A GPU computes the whole batch
    at once.
    """
    if kernel.device.type != "cpu":
        return _sums_of_products(kernel, first @ second.mT)
    moved = torch.empty_like(first[0], memory_format=torch.contiguous_format)
    sums = [
        torch.dot(torch.mm(k, b, out=moved).view(-1), a.reshape(-1))
        for k, a, b in zip(kernel, first, second, strict=True)
    ]
    return torch.stack(sums).double()


def _sums_of_products(first: Tensor, second: Tensor) -> Tensor:
    by_token: Tensor = torch.linalg.vecdot(first, second)
    return by_token.sum(dim=1, dtype=torch.float64)


def _per_token(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [batch, ..., features] as [batch, tokens, features]."""
    return values.reshape(len(values), -1, values.shape[-1]).to(dtype)


def _is_same(first: Tensor, held: Tensor, second: Tensor, other_held: Tensor) -> bool:
    pairs = ((first, held), (second, other_held))
    return all(
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        for one, other in pairs
    )


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
            f"{call.place} has no argument with "
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
