"""A batch as estimators see it: float64 numbers per token and per trajectory, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from vcpo.algo import Clipping, KLPenalty, LossConfig
from vcpo.wire.trajectory import Trajectory


class TokenInput(StrEnum):
    """What some configurations want to know of every token beside the learner's log-probability."""

    ENTROPY = "entropy"
    REFERENCE_LOGPROB = "reference_logprob"
    ADVANTAGE = "advantage"


def inputs_needed(config: LossConfig) -> frozenset[TokenInput]:
    """What has to be computed for a config; nothing of it is for most."""
    needed = {
        TokenInput.ENTROPY: config.clipping is Clipping.SPURIOUS,
        TokenInput.REFERENCE_LOGPROB: config.kl_penalty is KLPenalty.REFERENCE,
        TokenInput.ADVANTAGE: config.has_critic,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Who finds the trained tokens how likely; [n, width] nats each, any number outside `mask`."""

    learner: Tensor
    rollout: Tensor
    mask: Tensor
    """[n, width] bool; True on the tokens that were sampled and are trained on."""

    @property
    def lengths(self) -> Tensor:
        """[n] trained tokens, at least 1."""
        return self.mask.sum(dim=1)

    @property
    def log_ratios(self) -> Tensor:
        """[n, width] log pi - log mu, 0 outside the mask; -inf where the learner rules it out."""
        return (self.learner - self.rollout).masked_fill(~self.mask, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """What aggregations divide by: known before any forward pass."""

    trajectories: int
    tokens: int
    """Trained tokens of the whole batch."""
    longest_answer: int
    """Most tokens that an answer may have, `sampling.maxNewTokens`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRecord:
    """One optimizer step's batch; the trajectories of a prompt stand together."""

    logprobs: TokenLogprobs
    """[B, width] float64."""
    lags: Tensor
    """[B, width] int64; age of the policy that sampled the token, in versions."""
    size: BatchSize
    entropies: Tensor | None = None
    """[B, width] nats, of the learner's distribution that the token was drawn against."""
    reference_logprobs: Tensor | None = None
    """[B, width] nats, of the policy that training began with."""
    advantages: Tensor | None = None
    """[B, width] V-trace's, where a critic was asked."""


def batch_size(trajectories: Sequence[Trajectory], longest_answer: int) -> BatchSize:
    """Count what a batch holds."""
    return BatchSize(
        trajectories=len(trajectories),
        tokens=sum(each.num_sampled_tokens for each in trajectories),
        longest_answer=longest_answer,
    )


def batch_record(
    trajectories: Sequence[Trajectory],
    learner_logprobs: Sequence[Sequence[float]],
    *,
    policy_version: int,
    size: BatchSize,
    extras: Mapping[TokenInput, Sequence[Sequence[float]]],
) -> BatchRecord:
    """The batch with its response tokens from column 0 on.

    learner_logprobs: [B][T_i] nats, of the response tokens.
    extras: the same shape, whatever of `inputs_needed` was computed.
    """
    lags = [
        [lag for lag, count in each.lags(policy_version) for _ in range(count)]
        for each in trajectories
    ]
    return BatchRecord(
        logprobs=TokenLogprobs(
            learner=padded(learner_logprobs),
            rollout=padded([each.rollout_logprobs for each in trajectories]),
            mask=padded([[1.0] * len(row) for row in learner_logprobs]) > 0.0,
        ),
        lags=padded(lags).to(torch.int64),
        size=size,
        entropies=_padded_or_none(extras.get(TokenInput.ENTROPY)),
        reference_logprobs=_padded_or_none(extras.get(TokenInput.REFERENCE_LOGPROB)),
        advantages=_padded_or_none(extras.get(TokenInput.ADVANTAGE)),
    )


def padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """Rows [n][length] as one float64 tensor [n, longest], 0 behind the shorter ones."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def _padded_or_none(rows: Sequence[Sequence[float]] | None) -> Tensor | None:
    return None if rows is None else padded(rows)
