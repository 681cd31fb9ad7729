"""The record of one optimizer step's batch: tensors on the learner's device.

Trained tokens, those that the behavior policy sampled, stand in one row [N], one trajectory after
another, the trajectories of a prompt side by side. There is no padding and no mask:

```
trajectory    0 0 0 1 1 2 2 2 2        num_tokens  3 2 4
log pi        . . . . . . . . .        sums        . . .      one per trajectory, [B]
log mu        . . . . . . . . .        spread      one per token, [N]
```
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, chain

import torch
from torch import Tensor

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import Clipping, KLPenalty, LossConfig
from vcpo.wire.packing import PackedLogprobs
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.device import to_device


class TokenInput(StrEnum):
    """What some losses need of every token beside the two log-probabilities."""

    ENTROPY = "entropies"
    """Nats, of the target policy's distribution that the token is an outcome of."""
    REFERENCE_LOGPROB = "reference_logprobs"
    """Nats, under the policy that training began with."""
    ADVANTAGE = "advantages"
    """V-trace's."""


def inputs_needed(config: LossConfig) -> frozenset[TokenInput]:
    """Return what has to be computed for a loss; most need nothing."""
    needed = {
        TokenInput.ENTROPY: config.clipping is Clipping.SPURIOUS,
        TokenInput.REFERENCE_LOGPROB: config.kl_penalty is KLPenalty.REFERENCE,
        TokenInput.ADVANTAGE: config.has_critic,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """What aggregations divide by; known before any forward pass."""

    trajectories: int
    tokens: int
    """Trained tokens of the whole batch."""
    longest_response: int
    """Most tokens that a response may have, `sampling.maxNewTokens`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRecord:
    """A batch, or some trajectories of one. Owner: the tensor thread, for one update."""

    trajectory_ids: Sequence[str]
    """[B]"""
    num_tokens: Sequence[int]
    """[B] trained tokens, at least 1."""
    rewards: Tensor
    """[B] float64, as the environment gave them."""
    rollout_logprobs: Tensor
    """[N] log mu, nats: float32 if they came off the wire, else float64."""
    learner_logprobs: Tensor
    """[N] log pi, nats, float32 or better; NaN until the forward pass."""
    size: BatchSize
    """Size of the whole batch, also where the record has a part of it."""
    lags: Tensor | None = None
    """[N] int64 age of the version that sampled the token; only if the loss needs it."""
    entropies: Tensor | None = None
    """[N] as `TokenInput` says, and only if the loss needs them; so are the next two."""
    reference_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    lengths: Tensor = field(init=False)
    """[B] int64, `num_tokens` on the device."""
    starts: Sequence[int] = field(init=False)
    """[B] index of each trajectory's first token."""

    def __post_init__(self) -> None:
        lengths = to_device(torch.tensor(self.num_tokens, dtype=torch.int64), self.rewards.device)
        starts = tuple(accumulate(self.num_tokens, initial=0))[:-1]
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "starts", starts)

    @property
    def log_ratios(self) -> Tensor:
        return self.learner_logprobs.double() - self.rollout_logprobs

    def sums(self, values: Tensor) -> Tensor:
        return segment_sums(values, self.lengths)

    def spread(self, values: Tensor) -> Tensor:
        total = len(self.rollout_logprobs)
        return torch.repeat_interleave(values, self.lengths, output_size=total)

    def select(self, values: Tensor, positions: Sequence[int]) -> Tensor:
        # Also of none: a rank may have no trajectory.
        return torch.cat([values[:0], *(values[at:end] for at, end in self._stretches(positions))])

    def write(self, target: Tensor, positions: Sequence[int], values: Tensor) -> None:
        """Write the values of some trajectories' tokens, in this order, into `target` [N]."""
        stretches = self._stretches(positions)
        parts = torch.split(values, [end - start for start, end in stretches])
        for (start, end), part in zip(stretches, parts, strict=True):
            target[start:end] = part

    def part(self, positions: Sequence[int]) -> BatchRecord:
        """Return the record of some trajectories, in this order, without what only losses need."""
        return BatchRecord(
            trajectory_ids=[self.trajectory_ids[at] for at in positions],
            num_tokens=[self.num_tokens[at] for at in positions],
            rewards=self.rewards[list(positions)],
            rollout_logprobs=self.select(self.rollout_logprobs, positions),
            learner_logprobs=self.select(self.learner_logprobs, positions),
            size=self.size,
        )

    def log_weights(self) -> Tensor:
        """Return the log importance weight of each trajectory, untruncated, [B] nats.

        Raises: NonFiniteWeightError, naming the trajectory, at the first NaN or +inf of a token.
        """
        log_ratios = self.log_ratios
        is_bad = ~(log_ratios < torch.inf)
        if is_bad.any():
            first = int(is_bad.int().argmax())
            at = bisect_right(self.starts, first) - 1
            name = f"log_ratios of trajectory {self.trajectory_ids[at]!r}"
            raise NonFiniteWeightError(name, first - self.starts[at], float(log_ratios[first]))
        return self.sums(log_ratios)

    def _stretches(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Start and end of the tokens of some trajectories; neighbors share a stretch."""
        stretches: list[tuple[int, int]] = []
        for at in positions:
            start = self.starts[at]
            end = start + self.num_tokens[at]
            if stretches and stretches[-1][1] == start:
                start = stretches.pop()[0]
            stretches.append((start, end))
        return stretches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCoefficients:
    """The factor of each token's log-probability in the loss."""

    values: Tensor
    """[N] float64 k_it."""
    masked_share: float = 0.0
    """Share of tokens whose clip factor is 0, in [0, 1]; it is shown, and changes nothing."""


def batch_record(
    trajectories: Sequence[Trajectory],
    *,
    longest_response: int,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> BatchRecord:
    """Return the record of a batch, before any forward pass.

    longest_response: most tokens that a response may have.
    dtype: of the target policy's log-probabilities, float32 or better.
    """
    num_tokens = [each.num_sampled_tokens for each in trajectories]
    rewards = torch.tensor([each.reward for each in trajectories], dtype=torch.float64)
    total = sum(num_tokens)
    return BatchRecord(
        trajectory_ids=[each.trajectory_id for each in trajectories],
        num_tokens=num_tokens,
        rewards=to_device(rewards, device),
        rollout_logprobs=to_device(concatenate_rollout_logprobs(trajectories), device),
        learner_logprobs=torch.full((total,), torch.nan, dtype=dtype, device=device),
        size=BatchSize(
            trajectories=len(trajectories), tokens=total, longest_response=longest_response
        ),
    )


def token_lags(trajectories: Sequence[Trajectory], policy_version: int) -> Tensor:
    """Return the age of each trained token at `policy_version`, [N] int64 versions."""
    spans = list(chain.from_iterable(each.lags(policy_version) for each in trajectories))
    lags, counts = (torch.tensor(column) for column in zip(*spans, strict=True))
    return torch.repeat_interleave(lags, counts)


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return sums over consecutive segments of values [n]; lengths: [segments], adding up to n."""
    # The lengths are ours: a check of their sum would wait for the device.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def concatenate_rollout_logprobs(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return log mu of all trained tokens, [N] nats: float32 if all came off the wire."""
    rows = [each.rollout_logprobs for each in trajectories]
    packed = [row.data for row in rows if isinstance(row, PackedLogprobs)]
    if len(packed) == len(rows):
        return torch.frombuffer(bytearray().join(packed), dtype=torch.float32)
    return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float64)
