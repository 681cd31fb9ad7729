from statistics import fmean

import pytest
import torch

from benchmarks.estimators import calibration
from benchmarks.estimators.calibration import run, under
from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.ess.unit import EssKind, ess_unit


@pytest.mark.parametrize(("num_workers", "least"), [(1, 0.97), (8, 0.95)])
@pytest.mark.parametrize("num_tokens", [600, 3000])
def test_a_saturated_learner_follows_a_mismatch_that_moves(num_tokens, num_workers, least):
    generator = torch.Generator().manual_seed(3)
    steps = run(16, num_tokens, 0.0, 60, generator, num_workers)
    assert fmean(step.scale for step in steps) > least


def test_staleness_is_distinguished_from_a_mismatch_that_changes():
    steps = run(16, 3000, 2.0, 60, torch.Generator().manual_seed(4))
    assert fmean(step.true_scale for step in steps) < 0.75
    assert fmean(abs(step.scale / step.true_scale - 1) for step in steps) < 0.06
    # Other blocks give another reading of a batch: compare only means over many batches.
    differences = [step.scale - step.true_scale_reblocked for step in steps]
    assert fmean(differences) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("variance", [1e-5, 2e-4, 6.5e-4])
def test_blocks_under_the_mismatch_they_were_split_by_are_the_unit_itself(variance):
    unit = ess_unit(EssKind.AUTO, [3000] * 16, variance)
    again = under(unit, variance)
    assert (again.kind, again.blocks) == (unit.kind, unit.blocks)
    assert again.exponent == pytest.approx(unit.exponent, rel=1e-9)
    assert again.on_policy_ess_ratio == pytest.approx(unit.on_policy_ess_ratio, rel=1e-9)
    assert again.mismatch_nats == pytest.approx(unit.mismatch_nats, rel=1e-9)


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
    truth = [step.true_scale_reblocked for step in found]
    assert [step.true_scale_reblocked for step in wrong] == truth
    assert fmean(abs(step.scale / step.true_scale - 1) for step in wrong) > 0.15


def test_at_most_a_quarter_of_the_batch_is_scored_beside_it():
    steps = run(16, 600, 0.0, 5, torch.Generator().manual_seed(5))
    assert {step.fresh_tokens for step in steps} == {4 * 600}
