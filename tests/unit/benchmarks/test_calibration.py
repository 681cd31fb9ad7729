from statistics import fmean

import pytest
import torch

from benchmarks.calibration import run


@pytest.mark.parametrize("num_tokens", [600, 3000])
def test_a_saturated_learner_follows_a_mismatch_that_moves(num_tokens):
    generator = torch.Generator().manual_seed(3)
    steps = run(16, num_tokens, 0.0, 60, generator)
    assert fmean(step.scale for step in steps) > 0.97


def test_staleness_is_told_from_a_mismatch_that_moves():
    steps = run(16, 3000, 2.0, 60, torch.Generator().manual_seed(4))
    assert fmean(step.true_scale for step in steps) < 0.75
    assert fmean(abs(step.scale / step.true_scale - 1) for step in steps) < 0.06


def test_at_most_a_quarter_of_the_batch_is_scored_beside_it():
    steps = run(16, 600, 0.0, 5, torch.Generator().manual_seed(5))
    assert {step.fresh_tokens for step in steps} == {4 * 600}
