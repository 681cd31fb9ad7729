import math
import random
from itertools import chain
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.importance_weights import WeightMoments
from vcpo.algo.ess.unit import EssKind, ess_reading, ess_unit
from vcpo.algo.ess.verdict import StepLimits, judge_step

MISMATCH = 1e-3  # so that 1000 tokens have a mismatch of 1 nat^2


def drawn_moments(unit, variance, seed):
    """Of blocks whose tokens are independent, each with a mean ratio of 1."""
    rng = random.Random(seed)
    sizes = chain.from_iterable(unit.blocks)
    return WeightMoments.of([rng.gauss(-variance * n / 2, math.sqrt(variance * n)) for n in sizes])


def test_whole_trajectories_have_the_ratio_of_the_log_normal_law():
    unit = ess_unit(EssKind.SEQUENCE, [1000] * 64, MISMATCH)
    assert unit.on_policy_ess_ratio == pytest.approx(math.exp(-1), rel=1e-12)
    assert (unit.exponent, unit.blocks[0]) == (1.0, (1000,))


def test_tokens_have_one_ratio_whatever_the_lengths():
    unit = ess_unit(EssKind.TOKEN, [3, 7], MISMATCH)
    assert unit.on_policy_ess_ratio == pytest.approx(math.exp(-MISMATCH), rel=1e-12)
    assert unit.blocks == ((1,) * 3, (1,) * 7)


def test_blocks_have_a_quarter_of_a_nat_squared():
    unit = ess_unit(EssKind.BLOCK, [1000] * 64, MISMATCH)
    assert unit.blocks[0] == (250,) * 4
    assert unit.on_policy_ess_ratio == pytest.approx(math.exp(-0.25), rel=1e-9)


@pytest.mark.parametrize("kind", [EssKind.TOKEN, EssKind.BLOCK])
def test_the_exponent_restores_the_ratio_of_whole_trajectories(kind):
    unit = ess_unit(kind, [1500] * 64, MISMATCH)
    assert unit.on_policy_ess_ratio**unit.exponent == pytest.approx(math.exp(-1.5), rel=1e-9)


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [(999, EssKind.SEQUENCE), (1001, EssKind.BLOCK)],
    ids=["readable", "at its floor"],
)
def test_the_automatic_kind_follows_what_can_be_read(num_tokens, kind):
    assert ess_unit(EssKind.AUTO, [num_tokens] * 64, MISMATCH).kind is kind


@pytest.mark.parametrize("variance", [None, 0.0])
@pytest.mark.parametrize("kind", [EssKind.AUTO, EssKind.BLOCK])
def test_without_a_mismatch_whole_trajectories_are_read(kind, variance):
    unit = ess_unit(kind, [100_000], variance)
    assert (unit.kind, unit.on_policy_ess_ratio) == (EssKind.SEQUENCE, 1.0)


@pytest.mark.parametrize("kind", [EssKind.SEQUENCE, EssKind.BLOCK, EssKind.TOKEN])
def test_the_prediction_is_what_a_large_batch_shows(kind):
    lengths = [300, 900] * 5000 if kind is EssKind.SEQUENCE else [300, 900] * 100
    unit = ess_unit(kind, lengths, MISMATCH)
    shown = drawn_moments(unit, MISMATCH, seed=5).ess_ratio
    assert unit.on_policy_ess_ratio == pytest.approx(shown, rel=0.03)


def test_blocks_read_what_whole_trajectories_would():
    # Staleness of 1e-3 per token at 1000 tokens: exp(-1) of the on-policy ratio is left.
    unit = ess_unit(EssKind.BLOCK, [1000] * 2000, MISMATCH)
    stale = ess_reading(unit, drawn_moments(unit, 2 * MISMATCH, seed=3))
    assert stale.ess_ratio / stale.on_policy_ess_ratio == pytest.approx(math.exp(-1), rel=0.1)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("length", [600, 1500, 3000])
def test_on_policy_the_rule_takes_no_step_back_at_any_size(size, length):
    lengths = [length] * size
    unit = ess_unit(EssKind.AUTO, lengths, 6.5e-4)
    scales, published = [], []
    for seed in range(200):
        reading = ess_reading(unit, drawn_moments(unit, 6.5e-4, seed))
        numbers = reading.ess_ratio, reading.on_policy_ess_ratio
        scales.append(judge_step(*numbers, StepLimits(), chance_nats=reading.chance_nats).scale)
        published.append(judge_step(*numbers, StepLimits()).scale)
    assert fmean(scales) > max(0.985, fmean(published))


def test_the_on_policy_ratio_is_what_batches_of_the_size_show():
    # At s2 L = 1 most batches of 16 lack the weights that make 0.37 of batches without end.
    unit = ess_unit(EssKind.SEQUENCE, [1000] * 16, 1e-3)
    logs = [math.log(drawn_moments(unit, 1e-3, seed).ess_ratio) for seed in range(400)]
    reading = ess_reading(unit, drawn_moments(unit, 1e-3, 0))
    assert math.log(reading.on_policy_ess_ratio) == pytest.approx(fmean(logs), abs=0.05)
    assert reading.chance_nats == pytest.approx(2 * pstdev(logs), rel=0.1)


def test_an_uncertain_mismatch_widens_the_band():
    # Chance of the batch and of the calibration add up in squares; -log rho_on is 0.5.
    unit = ess_unit(EssKind.SEQUENCE, [500] * 64, 1e-3)
    moments = WeightMoments.of([0.0] * 64)
    known, guessed = (ess_reading(unit, moments, relative_error=r).chance_nats for r in (0.0, 0.3))
    assert guessed == pytest.approx(math.hypot(known, 2 * 0.5 * 0.3), rel=1e-9)


def test_a_reading_raises_both_ratios_to_the_exponent():
    # Two trajectories of two tokens; token weights 1, 1, 1, 3: 36 / (4 * 12), squared.
    unit = ess_unit(EssKind.TOKEN, [2, 2], None)
    reading = ess_reading(unit, WeightMoments.of([0.0, 0.0, 0.0, math.log(3)]))
    assert reading.ess_ratio == pytest.approx(0.5625, rel=1e-12)
    assert reading.on_policy_ess_ratio == 1.0


def test_a_reading_never_falls_below_one_trajectory():
    unit = ess_unit(EssKind.TOKEN, [1000, 1000], MISMATCH)
    reading = ess_reading(unit, WeightMoments.of([30.0, 0.0]))
    assert reading.ess_ratio == pytest.approx(0.5 * reading.on_policy_ess_ratio, rel=1e-12)


@given(
    st.sampled_from([EssKind.AUTO, EssKind.SEQUENCE, EssKind.BLOCK, EssKind.TOKEN]),
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.floats(0.0, 10.0),
)
def test_every_unit_cuts_all_tokens_and_expects_a_ratio(kind, num_tokens, variance):
    unit = ess_unit(kind, num_tokens, variance)
    assert [sum(blocks) for blocks in unit.blocks] == num_tokens
    assert 0.0 < unit.on_policy_ess_ratio <= 1.0
    assert unit.exponent > 0.0
