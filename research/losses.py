"""Losses of other groups that a study compares, by the door of `algorithm.loss`.

Each but `entropy_clip` is a paper's rule as its authors' code has it, on the learner's record:
u = pi/mu of a token, B trajectories with N trained tokens, and the mean over all N. Advantages are
those of the method that the study names, GRPO's.
"""

from typing import Final

import torch
from torch import Tensor

from vcpo.algo.methods import LossConfig
from vcpo_learner.estimator.record import BatchRecord, TokenCoefficients

DPPO_LARGEST_SHIFT: Final = 0.2
"""Probability by which a token may have moved the way that its advantage pushes it."""
DPPO_LARGEST_WEIGHT: Final = 20.0
TRM_LARGEST_TOKEN_KL: Final = 0.05
"""Nats, (log u)^2 / 2 of the worst token of a response."""
TRM_LARGEST_MEAN_KL: Final = 0.002
"""Nats, mean of u - 1 - log u over a response."""
M2PO_LARGEST_MOMENT: Final = 0.04
"""Mean of (log u)^2 over the tokens that their advantage moves further from 1."""
SEQUENCE_TIS_LARGEST_WEIGHT: Final = 2.0
ENTROPY_CLIP: Final = 0.2
"""Nats of log u that a token of the batch's mean entropy may move the way that it is pushed."""


def p3o(record: BatchRecord, advantages: Tensor, config: LossConfig) -> TokenCoefficients:
    """Return P3O's coefficients: the ESS of the tokens caps the weight and sets the penalty.

    k = (-A min(u, e) + (1 - e) (1 - 1/u)) / N, with e = (sum u)^2 / (N sum u^2). The second part is
    the gradient of log u + 1/u - 1, the penalty's estimate of the divergence from mu.
    Source: arXiv 2605.12380, and the authors' code.
    """
    ratios = record.log_ratios.exp()
    share = ratios.sum().square() / (ratios.square().sum() * len(ratios))
    weights = torch.minimum(ratios, share)
    penalty = (1.0 - share) * (1.0 - 1.0 / ratios)
    values = (-record.spread(advantages) * weights + penalty) / record.size.tokens
    return TokenCoefficients(values=values)


def dppo(record: BatchRecord, advantages: Tensor, config: LossConfig) -> TokenCoefficients:
    """Return the coefficients of DPPO with the total variation of the sampled token.

    k = -A min(u, 20) g / N, with g = 0 where the token is more probable than under mu by more than
    the largest shift and A > 0, or less probable by more and A < 0.
    Source: arXiv 2602.04879, binary total variation.
    """
    per_token = record.spread(advantages)
    shifts = record.learner_logprobs.double().exp() - record.rollout_logprobs.double().exp()
    is_kept = shifts * per_token.sign() <= DPPO_LARGEST_SHIFT
    weights = record.log_ratios.exp().clamp(max=DPPO_LARGEST_WEIGHT) * is_kept
    return _kept(-per_token * weights / record.size.tokens, is_kept)


def trm(record: BatchRecord, advantages: Tensor, config: LossConfig) -> TokenCoefficients:
    """Return the coefficients of trust-region masking: a response that leaves the region counts 0.

    k = -A u / N for responses whose worst token and whose mean are within their bounds.
    Source: arXiv 2512.23075.
    """
    log_ratios = record.log_ratios
    ratios = log_ratios.exp()
    worst = torch.segment_reduce(log_ratios.square() / 2.0, "max", lengths=record.lengths)
    mean = record.sums(ratios - 1.0 - log_ratios) / record.lengths
    is_inside = (worst <= TRM_LARGEST_TOKEN_KL) & (mean <= TRM_LARGEST_MEAN_KL)
    is_kept = record.spread(is_inside)
    values = -record.spread(advantages) * ratios / record.size.tokens
    return _kept(values, is_kept)


def m2po_clip(record: BatchRecord, advantages: Tensor, config: LossConfig) -> TokenCoefficients:
    """Return the coefficients of M2PO as its authors' code has it: a clip, where the paper masks.

    k = -A u g / N. S are the tokens with A > 0 and u > 1, or A < 0 and u < 1. The bound t is the
    largest abs(log u) in S at which the mean of min((log u)^2, t^2) over S is below the largest
    moment; 0 if there is none. g = 0 for tokens of S beyond it. One bound serves the whole batch.
    Source: arXiv 2510.01161, and the authors' code with its floors off, as in their scripts.
    """
    per_token = record.spread(advantages)
    log_ratios = record.log_ratios
    is_outward = log_ratios * per_token > 0.0
    squares = log_ratios[is_outward].square().sort().values
    is_kept = torch.ones_like(is_outward)
    if squares.sum() > M2PO_LARGEST_MOMENT * len(squares):
        above = torch.arange(len(squares) - 1, -1, -1, device=squares.device)
        capped = squares.cumsum(0) + squares * above
        num_below = int((capped < M2PO_LARGEST_MOMENT * len(squares)).sum())
        bound = squares[num_below - 1] if num_below else squares.new_zeros(())
        is_kept = ~(is_outward & (log_ratios.square() > bound))
    return _kept(-per_token * log_ratios.exp() / record.size.tokens, is_kept)


def grpo_sequence_tis(
    record: BatchRecord, advantages: Tensor, config: LossConfig
) -> TokenCoefficients:
    """Return the coefficients of GRPO with a truncated weight of the whole response.

    k = -A min(W, 2) / (B T), with W the product of u over the response. GRPO's clip compares the
    learner with itself, and does nothing in the one step that a batch gets.
    Source: verl's rollout correction, `rollout_is: sequence`.
    """
    weights = record.sums(record.log_ratios).exp().clamp(max=SEQUENCE_TIS_LARGEST_WEIGHT)
    shares = -advantages * weights / (record.size.trajectories * record.lengths)
    return TokenCoefficients(values=record.spread(shares))


def entropy_clip(record: BatchRecord, advantages: Tensor, config: LossConfig) -> TokenCoefficients:
    """Return the coefficients of a clip that is wider where the policy is less sure.

    k = -A u g / N, with g = 0 for a token that moved more than 0.2 H / mean(H) nats the way that
    its advantage pushes it, H the entropy at its place. `method: stapo` has entropies.
    Source: what the abstract of arXiv 2607.22186 names; form and scale are this project's.
    """
    if record.entropies is None:
        raise ValueError("entropies is None: this clip needs one per token")
    per_token, entropies = record.spread(advantages), record.entropies.double()
    moves = record.log_ratios * per_token.sign()
    is_kept = moves * entropies.mean() <= ENTROPY_CLIP * entropies
    return _kept(-per_token * record.log_ratios.exp() / record.size.tokens, is_kept)


def _kept(values: Tensor, is_kept: Tensor) -> TokenCoefficients:
    masked_share = float((~is_kept).double().mean())
    return TokenCoefficients(values=values.masked_fill(~is_kept, 0.0), masked_share=masked_share)
