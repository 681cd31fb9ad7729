from statistics import fmean

import pytest
import torch

from benchmarks import calibration
from benchmarks.calibration import run
from vcpo.algo import MismatchCalibration


@pytest.mark.parametrize("num_tokens", [600, 3000])
def test_a_saturated_learner_follows_a_mismatch_that_moves(num_tokens):
    generator = torch.Generator().manual_seed(3)
    steps = run(16, num_tokens, 0.0, 60, generator)
    assert fmean(step.scale for step in steps) > 0.97


def test_staleness_is_told_from_a_mismatch_that_moves():
    steps = run(16, 3000, 2.0, 60, torch.Generator().manual_seed(4))
    assert fmean(step.true_scale for step in steps) < 0.75
    # A batch cut into other pieces is read anew: of those only the mean over many says anything.
    alike = [abs(step.scale / step.true_scale - 1) for step in steps if step.is_cut_alike]
    assert len(alike) > 30
    assert fmean(alike) < 0.06
    assert fmean(step.scale - step.true_scale for step in steps) == pytest.approx(0, abs=0.05)


class Overestimating(MismatchCalibration):
    """Takes the mismatch for twice what it has seen."""

    @property
    def variance_per_token(self):
        seen = super().variance_per_token
        return None if seen is None else 2.0 * seen


def test_a_wrong_estimate_moves_the_scale_and_not_the_one_it_is_compared_with(monkeypatch):
    found = run(16, 3000, 2.0, 40, torch.Generator().manual_seed(6))
    monkeypatch.setattr(calibration, "MismatchCalibration", Overestimating)
    wrong = run(16, 3000, 2.0, 40, torch.Generator().manual_seed(6))
    assert [step.true_scale for step in wrong] == [step.true_scale for step in found]
    assert [step.scale for step in wrong] != [step.scale for step in found]


def test_at_most_a_quarter_of_the_batch_is_scored_beside_it():
    steps = run(16, 600, 0.0, 5, torch.Generator().manual_seed(5))
    assert {step.fresh_tokens for step in steps} == {4 * 600}
