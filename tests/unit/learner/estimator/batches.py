"""Batches of numbers for estimators: given row by row, or drawn at random."""

import math
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from vcpo.algo import LOSS_CONFIGS, LossConfig, Method
from vcpo_learner.estimator.coefficients import token_coefficients
from vcpo_learner.estimator.record import BatchRecord, BatchSize, TokenLogprobs, padded

Rows = Sequence[Sequence[float]]
MU = math.log(0.25)


def record_of(
    log_ratios: Rows, *, mu: float = MU, longest: int = 8, lag: int = 1, **extras: Rows
) -> BatchRecord:
    """A batch whose learner is off the sampler by these nats per token."""
    mask = padded([[1.0] * len(row) for row in log_ratios]) > 0
    rollout = torch.full(mask.shape, mu, dtype=torch.float64)
    tokens = int(mask.sum())
    return BatchRecord(
        logprobs=TokenLogprobs(learner=rollout + padded(log_ratios), rollout=rollout, mask=mask),
        lags=torch.full(mask.shape, lag),
        size=BatchSize(trajectories=len(log_ratios), tokens=tokens, longest_answer=longest),
        **{name: padded(rows) for name, rows in extras.items()},
    )


def drawn(seed: int = 0, *, spread: float = 0.4) -> tuple[BatchRecord, list[float]]:
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
