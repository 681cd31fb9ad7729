"""Bad workers, up to a half, do not raise the learning rate above the rule as published.

The rule is that of the learner: blocks, calibration, unit, reading and verdict. It is compared with
the published rule under the true mismatch of honest workers, which is known by construction.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fixtures.fleets import NOISE, VARIANCE, calibrations
from tests.fixtures.learner.dispatcher import make_trajectory
from vcpo.algo.ess.calibration import MismatchCalibration, MismatchEstimate
from vcpo.algo.ess.importance_weights import ess_ratio
from vcpo.api.algorithm import Algorithm
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.update.batch_decision import BatchSummary, batch_ess_unit, decide_step
from vcpo_learner.update.batch_statistics import batch_moments
from vcpo_learner.update.fresh_tokens import fresh_blocks

LOWEST, HIGHEST = -100.0, 1e-3
"""Log-probabilities that a submission may have."""


def scale_of(calibration, log_ratios):
    """The learner's scale for a batch of whole trajectories, [B, tokens] log ratios."""
    settings = Algorithm.model_validate({"method": "vcpo", "deadBand": 0.0})
    size, length = log_ratios.shape
    batch = BatchSummary(
        group_sizes=[size],
        num_tokens=[length] * size,
        rewards=[0.0] * size,
        log_weights=log_ratios.sum(1).tolist(),
        squared_norms=[1.0] * size,
    )
    unit = batch_ess_unit(batch, settings, calibration)
    moments = batch_moments(batch, torch.tensor(log_ratios.ravel()), unit)
    decided = decide_step(unit, moments, settings, relative_error=calibration.relative_error)
    return decided.verdict.scale


def honest(rng, shape, variance=VARIANCE):
    return rng.normal(-variance / 2, math.sqrt(variance), shape)


@pytest.mark.parametrize("tokens", [100, 4000])
@pytest.mark.parametrize("situation", [each for each in NOISE if each != "honest"])
def test_the_rate_beside_noisy_workers_is_that_of_honest_ones(situation, tokens):
    rng = np.random.default_rng(0)
    stale = honest(rng, (128, tokens), VARIANCE + 1.0 / tokens)
    true = MismatchCalibration(estimate=MismatchEstimate(variance_per_token=VARIANCE, count=10**6))
    allowed = scale_of(true, stale)
    *_, last = calibrations(situation, workers=16, tokens=tokens, steps=60, seed=1)
    assert 0.9 * allowed <= scale_of(last, stale) <= 1.1 * allowed < 1.0


def faulty(rng, shape, fault):
    """Log ratios of responses whose log-probabilities are no policy's."""
    learner = -rng.exponential(1.0, shape)
    match fault:
        case "low":
            rollout = learner - 0.1
        case "lower":
            rollout = learner - 10.0
        case "high":
            rollout = learner + 0.1
        case "temperature":
            rollout = learner * 2.0
        case "one huge":
            rollout = learner.copy()
            rollout[0] = LOWEST
        case "certain":
            rollout = np.full(shape, HIGHEST)
        case "impossible":
            learner[:, 0] = -math.inf
            rollout = np.full(shape, -1.0)
    return learner - np.clip(rollout, LOWEST, HIGHEST)


@pytest.mark.parametrize(
    "fault", ["low", "lower", "high", "temperature", "one huge", "certain", "impossible"]
)
@pytest.mark.parametrize(("num_honest", "num_bad"), [(3, 1), (1, 1), (4, 4)])
def test_the_rate_beside_workers_at_fault_is_about_the_published_one(num_honest, num_bad, fault):
    rng = np.random.default_rng(1)
    calibration = MismatchCalibration()
    one = replace(
        make_trajectory("lease", 0), version_spans=(VersionSpan(policy_version=3, num_tokens=64),)
    )
    for _ in range(30):
        rows = [(f"honest-{n}", honest(rng, (4, 64))) for n in range(num_honest)]
        rows += [(f"bad-{n}", faulty(rng, (4, 64), fault)) for n in range(num_bad)]
        responses = [replace(one, worker_id=name) for name, _ in rows for _ in range(4)]
        ratios = torch.tensor(np.concatenate([each.ravel() for _, each in rows]))
        blocks = fresh_blocks(responses, ratios, 3, torch.full_like(ratios, -1.0))
        calibration = calibration.observe(blocks)
    batch = honest(rng, (64, 64), VARIANCE + 5e-3)
    published = math.sqrt(ess_ratio(batch.sum(1).tolist()) / math.exp(-VARIANCE * 64))
    assert scale_of(calibration, batch) == pytest.approx(published, rel=0.02)
