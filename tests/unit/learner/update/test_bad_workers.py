"""No share of up to a half of bad workers raises the learning rate above the published rule.

A simulated run: workers sample fresh tokens, which calibrate, and stale ones, which are trained on.
The rule is that of the learner: blocks, calibration, unit, reading, verdict and trust region. What
it may be compared with is the rule as published, with the on-policy ratio of honest workers alone.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import make_trajectory
from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, ess_ratio
from vcpo.algo.ess.trust_region import TrustRegion
from vcpo.api.algorithm import Algorithm
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.update.batch_decision import BatchSummary, batch_ess_unit, decide_step
from vcpo_learner.update.batch_statistics import batch_moments
from vcpo_learner.update.fresh_tokens import fresh_blocks

LOWEST, HIGHEST = -100.0, 1e-3
"""Log-probabilities that a submission may have."""
LEARNER = -1.0
"""Mean log-probability of a token under the learner."""
FAULTS = ("offset", "temperature", "one huge", "all huge", "certain", "mixed", "impossible")


def honest_ratios(rng, shape, variance):
    return rng.normal(-variance / 2, math.sqrt(variance), shape)


def bad_ratios(rng, shape, fault, size):
    """Log ratios of responses whose accepted log-probabilities are no policy's."""
    learner = -rng.exponential(-LEARNER, shape)
    match fault:
        case "offset":
            rollout = learner - size
        case "temperature":
            rollout = learner * (1.0 + abs(size))
        case "one huge":
            rollout = learner.copy()
            rollout[0] = LOWEST
        case "all huge":
            rollout = np.full(shape, LOWEST)
        case "certain":
            rollout = np.full(shape, HIGHEST)
        case "mixed":
            rollout = learner + rng.normal(0.0, abs(size), shape)
        case "impossible":
            learner[:, 0] = -math.inf
            rollout = np.full(shape, -1.0)
    return learner - np.clip(rollout, LOWEST, HIGHEST)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers of a run, and what the bad ones do."""

    honest: tuple[str, ...]
    bad: tuple[str, ...]
    variance: float
    """Mismatch of the honest ones, nats^2 per token."""
    staleness: float
    """Nats^2 per token of what they submit for training."""
    num_tokens: int
    faults: tuple[str, ...]
    """Of the bad ones, one step after another."""
    size: float
    presence: tuple[bool, ...]
    """Whether the bad ones are there, one step after another."""


@st.composite
def fleets(draw, num_tokens):
    num_honest = draw(st.integers(1, 4))
    num_bad = draw(st.integers(0, num_honest))
    return Fleet(
        honest=tuple(f"honest-{number}" for number in range(num_honest)),
        bad=tuple(f"bad-{number}" for number in range(num_bad)),
        variance=draw(st.sampled_from([0.0, 1e-5, 6.5e-4, 2e-3])),
        staleness=draw(st.sampled_from([0.0, 1e-3, 1e-2])),
        num_tokens=draw(num_tokens),
        faults=tuple(draw(st.lists(st.sampled_from(FAULTS), min_size=1, max_size=3))),
        size=draw(st.floats(-12.0, 12.0)),
        presence=tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3))),
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step of a simulated run came to."""

    calibration: MismatchCalibration
    honest_variance: float
    """Largest that an honest worker alone has shown so far, over any reach; 0 before it counts."""
    log_weights: list[float]
    log_ratios: torch.Tensor
    num_tokens: list[int]

    def decide(self, calibration, **algorithm):
        """The decision of the learner; None if it refuses the step."""
        settings = Algorithm.model_validate({"method": "vcpo", **algorithm})
        size = len(self.log_weights)
        batch = BatchSummary(
            group_sizes=[size],
            num_tokens=self.num_tokens,
            rewards=[0.0] * size,
            log_weights=self.log_weights,
            squared_norms=[1.0] * size,
        )
        unit = batch_ess_unit(batch, settings, calibration)
        try:
            moments = batch_moments(batch, self.log_ratios, unit)
            return decide_step(unit, moments, settings, relative_error=calibration.relative_error)
        except NonFiniteWeightError:
            return None

    @property
    def published_scale(self):
        """sqrt(min(1, rho / rho_on)) of whole trajectories, with the honest mismatch."""
        nats = self.honest_variance * np.array(self.num_tokens, dtype=float)
        on_policy = 1.0 / float(np.mean(np.exp(nats)))
        return math.sqrt(min(1.0, ess_ratio(self.log_weights) / on_policy))


def run_of(fleet, *, steps, seed):
    """Yield the steps of a run in which every worker submits some responses at every step."""
    rng = np.random.default_rng(seed)
    calibration = MismatchCalibration()
    alone = {worker: MismatchCalibration() for worker in fleet.honest}
    honest_variance = 0.0
    for step in range(steps):
        is_there = fleet.presence[step % len(fleet.presence)]
        fault = fleet.faults[step % len(fleet.faults)]
        fresh, batch = [], []
        for worker in (*fleet.honest, *(fleet.bad if is_there else ())):
            for rows in (fresh, batch):
                shape = (int(rng.integers(1, 5)), fleet.num_tokens)
                if worker in fleet.bad:
                    ratios = bad_ratios(rng, shape, fault, fleet.size)
                else:
                    stale = fleet.staleness if rows is batch else 0.0
                    ratios = honest_ratios(rng, shape, fleet.variance + stale)
                rows += [(worker, each) for each in ratios]
        calibration = observed(calibration, fresh)
        for worker, own in alone.items():
            alone[worker] = observed(own, [row for row in fresh if row[0] == worker])
            seen = alone[worker].workers.get(worker)
            if seen is not None and seen.portions:
                found = accumulate(reversed(seen.portions))
                honest_variance = max(honest_variance, *(each.variance_per_token for each in found))
        yield Step(
            calibration=calibration,
            honest_variance=honest_variance,
            log_weights=[float(each.sum()) for _, each in batch],
            log_ratios=torch.tensor(np.concatenate([each for _, each in batch])),
            num_tokens=[fleet.num_tokens] * len(batch),
        )


def observed(calibration, rows):
    """The calibration after fresh responses of these workers."""
    if not rows:
        return calibration.observe([], [])
    size = len(rows[0][1])
    one = replace(
        make_trajectory("lease", 0),
        version_spans=(VersionSpan(policy_version=3, num_tokens=size),),
    )
    responses = [replace(one, worker_id=worker) for worker, _ in rows]
    ratios = torch.tensor(np.concatenate([each for _, each in rows]))
    blocks = fresh_blocks(responses, ratios, 3, torch.full_like(ratios, LEARNER))
    return calibration.observe(blocks.log_weights, blocks.num_tokens, blocks.workers)


def reference(honest_variance):
    """A calibration that has nothing but the honest mismatch, from the fewest blocks that count."""
    calibration = MismatchCalibration()
    variance = 32 * honest_variance
    nats = math.sqrt(variance + variance**2 / 4)
    return calibration.observe([nats, -nats] * 8, [32] * 16)


SHORT = st.sampled_from([8, 32, 100])
LONG = st.sampled_from([300, 1500])


@settings(max_examples=40, deadline=None)
@given(fleets(SHORT | LONG), st.integers(0, 2**32 - 1))
def test_the_mismatch_is_never_above_that_of_an_honest_worker(fleet, seed):
    for step in run_of(fleet, steps=5, seed=seed):
        found = step.calibration.variance_per_token or 0.0
        assert found <= step.honest_variance * (1 + 1e-12)
        # 16 blocks are the fewest that count.
        assert step.calibration.relative_error <= math.sqrt(2 / 16)


@settings(max_examples=40, deadline=None)
@given(fleets(SHORT), st.sampled_from(["auto", "sequence"]), st.integers(0, 2**32 - 1))
def test_the_scale_is_never_above_the_published_rule_of_honest_workers(fleet, kind, seed):
    for step in run_of(fleet, steps=5, seed=seed):
        decision = step.decide(step.calibration, essKind=kind, deadBand=0.0)
        if decision is not None:
            assert 0.0 < decision.verdict.scale <= step.published_scale * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(fleets(SHORT), st.integers(0, 2**32 - 1))
def test_the_band_of_chance_is_no_wider_than_that_of_honest_workers(fleet, seed):
    for step in run_of(fleet, steps=5, seed=seed):
        decision = step.decide(step.calibration)
        honest = step.decide(reference(step.honest_variance))
        if decision is not None:
            # The law of a finite batch is simulated on a grid.
            assert decision.reading.chance_nats <= honest.reading.chance_nats * 1.05 + 1e-12
            assert 0.0 < decision.verdict.scale <= honest.verdict.scale * 1.05


@settings(max_examples=15, deadline=None)
@given(fleets(SHORT), st.integers(0, 2**32 - 1))
def test_the_trust_region_allows_no_more_than_with_honest_workers(fleet, seed):
    own = honest = TrustRegion(horizon_steps=3)
    for step in run_of(fleet, steps=6, seed=seed):
        algorithm = {"learningRateRule": "trustRegion", "deadBand": 0.0}
        decision = step.decide(step.calibration, **algorithm)
        expected = step.decide(reference(step.honest_variance), **algorithm)
        if decision is None:
            continue
        own, rate = region_after(own, decision.reading)
        honest, most = region_after(honest, expected.reading)
        assert rate <= most * (1 + 1e-9)
        assert decision.verdict.scale <= expected.verdict.scale * (1 + 1e-9)


def region_after(region, reading):
    """The region after a batch of lag 2, and the rate that it allowed."""
    missing_nats = math.log(reading.on_policy_ess_ratio / reading.ess_ratio)
    region = region.observe(missing_nats, {2: 1})
    rate = region.largest_rate(1.0)
    return region.step(rate, rate), rate


FAULTY = (
    ("temperature", 1.0),
    ("offset", 0.1),
    ("offset", 10.0),
    ("offset", -0.1),
    ("one huge", 0),
)


@pytest.mark.parametrize(("fault", "size"), FAULTY)
@pytest.mark.parametrize(("num_honest", "num_bad"), [(3, 1), (7, 1), (1, 1), (2, 2)])
def test_the_scale_beside_bad_workers_is_about_the_published_one(num_honest, num_bad, fault, size):
    fleet = Fleet(
        honest=tuple(f"honest-{number}" for number in range(num_honest)),
        bad=tuple(f"bad-{number}" for number in range(num_bad)),
        variance=6.5e-4,
        staleness=0.0,
        num_tokens=64,
        faults=(fault,),
        size=size,
        presence=(True,),
    )
    *_, last = run_of(fleet, steps=30, seed=1)
    exact = replace(last, honest_variance=fleet.variance)
    scale = last.decide(last.calibration, deadBand=0.0).verdict.scale
    assert scale == pytest.approx(exact.published_scale, rel=0.02)
