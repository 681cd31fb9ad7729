"""Batches of numbers for estimators: given row by row, or drawn at random."""

import math
from collections.abc import Sequence
from itertools import chain
from random import Random

import torch
from torch import Tensor

from vcpo.algo.methods import LOSS_CONFIGS, LossConfig, Method
from vcpo_learner.estimator.loss import token_coefficients
from vcpo_learner.estimator.record import BatchRecord, BatchSize

Rows = Sequence[Sequence[float]]
MU = math.log(0.25)


def record_of(
    log_ratios: Rows, *, mu: float = MU, longest: int = 8, lag: int = 1, **inputs: Rows
) -> BatchRecord:
    """A batch whose target policy is off the behavior policy by these nats per token."""
    gaps = flat(log_ratios)
    rollout = torch.full_like(gaps, mu)
    return BatchRecord(
        trajectory_ids=[f"lease/{row}" for row in range(len(log_ratios))],
        num_tokens=[len(row) for row in log_ratios],
        rewards=torch.zeros(len(log_ratios), dtype=torch.float64),
        rollout_logprobs=rollout,
        learner_logprobs=rollout + gaps,
        lags=torch.full(gaps.shape, lag),
        size=BatchSize(trajectories=len(log_ratios), tokens=len(gaps), longest_response=longest),
        **{name: flat(rows) for name, rows in inputs.items()},
    )


def flat(rows: Rows) -> Tensor:
    return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.float64)


def rows_of(record: BatchRecord, values: Tensor) -> list[list[float]]:
    """Values [N] as plain numbers, one list per trajectory."""
    return [row.tolist() for row in torch.split(values, list(record.num_tokens))]


def random_batch(seed: int = 0, *, spread: float = 0.4) -> tuple[BatchRecord, list[float]]:
    """Eight trajectories of one to six tokens, and advantages of both signs."""
    random = Random(seed)
    rows = [[random.gauss(0.0, spread) for _ in range(random.randint(1, 6))] for _ in range(8)]
    entropies = [[random.uniform(0.1, 2.0) for _ in row] for row in rows]
    reference = [[MU + random.gauss(0.0, 0.3) for _ in row] for row in rows]
    record = record_of(rows, entropies=entropies, reference_logprobs=reference)
    return record, [random.gauss(0.0, 1.0) for _ in rows]


def coefficients(record: BatchRecord, advantages: Sequence[float], config: LossConfig) -> Tensor:
    return token_coefficients(record, advantages, config).values


def of_method(method: Method | str, record: BatchRecord, advantages: Sequence[float]) -> Tensor:
    return coefficients(record, advantages, LOSS_CONFIGS[Method(method)])
