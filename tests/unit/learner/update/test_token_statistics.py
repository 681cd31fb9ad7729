from dataclasses import astuple
from itertools import chain
from random import Random

import pytest
import torch

from vcpo.algo.ess.moments import WeightMoments
from vcpo.algo.ess.unit import block_log_weights, near_equal_blocks
from vcpo.algo.health.diagnostics import TokenSums
from vcpo_learner.update.batch_statistics import block_moments, token_sums


def rows():
    random = Random(0)
    return [[random.gauss(0.0, 1.0) for _ in range(length)] for length in (1, 7, 12)]


def log_ratios():
    return torch.tensor(list(chain.from_iterable(rows())), dtype=torch.float64)


def close(found, expected):
    return astuple(found) == pytest.approx(astuple(expected), rel=1e-12)


def test_sums_over_tokens_are_those_of_plain_numbers():
    found = token_sums(log_ratios())
    expected = TokenSums.of([each for row in rows() for each in row])
    assert close(found.weights, expected.weights)
    assert found.k3_sum == pytest.approx(expected.k3_sum, rel=1e-12)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_moments_of_blocks_are_those_of_plain_numbers(size):
    blocks = [near_equal_blocks(len(row), size) for row in rows()]
    logs = [
        weight
        for row, own in zip(rows(), blocks, strict=True)
        for weight in block_log_weights(row, own)
    ]
    assert close(block_moments(log_ratios(), blocks), WeightMoments.of(logs))
