"""Log-probabilities of sampled tokens from hidden states, with their gradient, tile by tile.

No tensor has an entry for each token and each row of the vocabulary, neither forward nor backward.
The head's own gradient is ordinary, or an observer measures it by trajectory.

Cost in products of all tokens with the head's matrix: one to score; four for a gradient, where full
logits need three: the logits are computed once more.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vcpo_learner.output_head.distributions import Wanted, token_distributions
from vcpo_learner.output_head.gradient_tiles import HeadObjective, parameter_gradients
from vcpo_learner.output_head.logit_tiles import (
    LogitForm,
    TiledLogits,
    TileSize,
    TokenRows,
    tile_size,
)
from vcpo_learner.output_head.recorded_head import RecordedHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadRequest:
    """One application of a head."""

    targets: Tensor
    """[tokens] int64 sampled tokens."""
    form: LogitForm
    temperature: float
    input_dtype: torch.dtype | None = None
    """Number type of the products' inputs; None for the matrix's own."""
    size: TileSize | None = None
    """Size of a tile; None for the device's usual one."""
    rows: TokenRows | None = None
    """The head's rows that are tokens; None if all are."""
    entropies: bool = False
    observer: RecordedHead | None = None
    is_fused: bool = False
    """Whether a GPU computes each function of a tile in one kernel."""


class TokenScores(NamedTuple):
    """What a head says of each token; a tuple, because FSDP looks for tensors in tuples only."""

    logprobs: Tensor
    """[tokens] nats, float32 or better, with a graph."""
    entropies: Tensor | None = None
    """[tokens] nats, without a graph; None if not wanted."""


def apply_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest
) -> TokenScores:
    """Score tokens by the states that predict them.

    hidden: [tokens, hidden]; weight: [vocabulary, hidden]; bias: [vocabulary].
    """
    needs_directions = torch.is_grad_enabled() and hidden.requires_grad
    anchor = None if request.observer is None else request.observer.recording.anchor
    logprobs, entropies = _TiledHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, anchor, request, needs_directions
    )
    return TokenScores(logprobs=logprobs, entropies=entropies)


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        request: HeadRequest,
        needs_directions: bool,
    ) -> tuple[Tensor, Tensor | None]:
        wanted = Wanted(directions=needs_directions, entropies=request.entropies)
        with torch.autocast(hidden.device.type, enabled=False):
            found = token_distributions(
                _logits(hidden, weight, bias, request), request.targets, wanted
            )
        ctx.request = request
        ctx.save_for_backward(hidden, weight, bias, found.log_normalizers, found.directions)
        if found.entropies is not None:
            ctx.mark_non_differentiable(found.entropies)
        return found.logprobs, found.entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_normalizers, directions = ctx.saved_tensors
        request: HeadRequest = ctx.request
        weights = gradients[0]
        assert weights is not None
        to_hidden = None
        if directions is not None:
            to_hidden = (directions * weights[:, None]).to(hidden.dtype)
        objective = HeadObjective(
            logits=_logits(hidden, weight, bias, request),
            targets=request.targets,
            log_normalizers=log_normalizers,
            weights=weights,
        )
        to_weight = to_bias = None
        if request.observer is not None and request.observer.recording.measuring is not None:
            request.observer.measure(objective)
        elif weight.requires_grad or (bias is not None and bias.requires_grad):
            to_weight, to_bias = _parameter_gradients(objective)
        return to_hidden, to_weight, to_bias, None, None, None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, request: HeadRequest
) -> TiledLogits:
    return TiledLogits(
        hidden=hidden,
        weight=weight,
        bias=bias,
        form=request.form,
        temperature=request.temperature,
        input_dtype=request.input_dtype or weight.dtype,
        size=request.size or tile_size(hidden.device),
        rows=request.rows,
        is_fused=request.is_fused,
    )


def _parameter_gradients(objective: HeadObjective) -> tuple[Tensor, Tensor | None]:
    logits = objective.logits
    has_bias = logits.bias is not None and logits.bias.requires_grad
    weight, bias = parameter_gradients(objective, needs_bias=has_bias)
    return weight.to(logits.weight.dtype), None if bias is None else bias.to(logits.weight.dtype)
