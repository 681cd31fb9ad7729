import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo import DriftMeans, TrustRegion

BASE = 1e-3
ALLOWED_NATS = -math.log(0.6)
"""What data at the edge of the region misses, at the default target."""


def walk(base_rate, nats_per_squared_rate, lag, steps=400, horizon=None):
    """Train where the policy walks at random: e = a q, every batch `lag` steps old.

    Returns the rates and the nats that each batch missed.
    """
    region = TrustRegion(horizon_steps=lag if horizon is None else horizon)
    rates, missing = [], []
    for step in range(steps):
        age = min(step, lag)
        nats = nats_per_squared_rate * sum(rate**2 for rate in rates[step - age :])
        region = region.observe(nats, {age: 64})
        rate = region.largest_rate(base_rate)
        region = region.step(rate, rate)
        rates.append(rate)
        missing.append(nats)
    return rates, missing


def nats_per_squared_rate(rate, lag):
    """The drift of a world in which this rate is on the edge of the region at this lag."""
    return ALLOWED_NATS / (lag * rate**2)


def means(**numbers):
    """The same means over 10 steps twice, those of a horizon of 10 steps or less."""
    return (DriftMeans(steps=10, **numbers),) * 2


def drifting(drifts, lag=32):
    """The rates under a drift that changes by step, inside its region at BASE / 2 while it is 1."""
    unit = nats_per_squared_rate(BASE / 2, lag)
    region, rates = TrustRegion(horizon_steps=lag), []
    for step, drift in enumerate(drifts):
        age = min(step, lag)
        nats = drift * unit * sum(rate**2 for rate in rates[step - age :])
        region = region.observe(nats, {age: 64})
        rates.append(region.largest_rate(BASE))
        region = region.step(rates[-1], rates[-1])
    return rates


def test_the_rate_falls_within_the_short_mean_when_the_drift_grows():
    rates = drifting([1.0] * 100 + [16.0] * 10)
    assert rates[99] == pytest.approx(BASE / 2, rel=0.02)
    assert rates[109] < 0.4 * rates[99]


def test_the_rate_rises_over_the_horizon_when_the_policy_stands_still():
    rates = drifting([1.0] * 100 + [0.0] * 32)
    # Over 32 steps the long mean of e falls by exp(-1), which alone is exp(1/2) in the rate.
    assert rates[131] <= 2.0 * rates[99]
    assert rates[131] > 1.2 * rates[99]


@pytest.mark.parametrize("lag", [1, 2, 8, 32])
@pytest.mark.parametrize("edge", [1e-4, 1e-5, 1e-6])
def test_the_rate_comes_to_the_edge_of_the_region_from_any_base_rate(edge, lag):
    rates, missing = walk(BASE, nats_per_squared_rate(edge, lag), lag)
    assert max(edge, BASE / 64) == pytest.approx(rates[-1], rel=1e-3)
    if edge >= BASE / 64:
        assert missing[-1] == pytest.approx(ALLOWED_NATS, rel=2e-3)


@given(st.floats(-1.5, 1.0), st.integers(1, 32))
def test_on_the_way_no_batch_leaves_the_region_by_more_than_its_first_steps_take(log_edge, lag):
    edge = BASE * 10**log_edge
    _, missing = walk(BASE, nats_per_squared_rate(edge, lag), lag, steps=200)
    first = nats_per_squared_rate(edge, lag) * (BASE / lag) ** 2
    assert max(missing) <= max(1.5 * ALLOWED_NATS, 5.0 * first)


@pytest.mark.parametrize("lag", [1, 8, 32])
def test_a_base_rate_inside_the_region_is_the_rate_after_the_start(lag):
    rates, _ = walk(BASE, nats_per_squared_rate(2.0 * BASE, lag), lag)
    start = math.ceil(math.log2(lag))
    assert rates[start:] == [BASE] * (400 - start)


def test_the_rate_starts_at_its_share_of_the_horizon_and_doubles():
    rates, _ = walk(BASE, 0.0, lag=8, steps=5)
    assert rates == [BASE / 8, BASE / 4, BASE / 2, BASE, BASE]


def test_without_a_lag_there_is_no_region():
    rates, _ = walk(BASE, 1e9, lag=0, steps=3)
    assert rates == [BASE] * 3


def test_a_horizon_beyond_the_lag_allows_the_rate_of_the_horizon():
    # At lag 8 the policy moves a quarter of what it moves in 32 steps.
    drift = nats_per_squared_rate(1e-4, lag=32)
    rates, missing = walk(BASE, drift, lag=8, horizon=32)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-3)
    assert missing[-1] == pytest.approx(ALLOWED_NATS / 4, rel=2e-3)


def test_a_token_is_as_far_away_as_the_steps_since_it_was_sampled():
    # Squared rates 4 and 1: distances 0, 1 and 5 at lags 0, 1 and 2, and 5 at any larger lag.
    region = TrustRegion(horizon_steps=4, squared_rates=(4.0, 1.0))
    short, _ = region.observe(0.5, {0: 1, 1: 2, 2: 1, 9: 4}).means
    assert short.squared_distance == pytest.approx(0.1 * (0 + 2 + 5 + 20) / 8)
    assert short.missing_nats == pytest.approx(0.05)


def test_the_edge_is_where_the_nats_of_the_horizon_are_the_target():
    # a = 2 / 8; at H = 4 the squared rate is 0.25 / (a 4) = 0.25.
    region = TrustRegion(
        horizon_steps=4,
        target_ess_ratio=math.exp(-0.25),
        means=means(missing_nats=2.0, squared_distance=8.0),
        bound=1.0,
    )
    assert region.largest_rate(1.0) == pytest.approx(0.5)


def test_what_chance_explains_of_the_mean_does_not_bound_the_rate():
    # A mean over 10 steps is one of 19 batches: it scatters by 1 / sqrt(19) of one.
    found = means(missing_nats=0.1, squared_distance=1e-9)
    region = TrustRegion(horizon_steps=4, means=found, bound=1.0)
    assert region.largest_rate(1.0, chance_nats=0.1 * math.sqrt(19.0)) == 1.0
    assert region.largest_rate(1.0, chance_nats=0.09 * math.sqrt(19.0)) == 1 / 64


def test_chance_that_does_not_reach_half_of_the_mean_takes_nothing_off():
    found = means(missing_nats=0.4, squared_distance=0.4)
    region = TrustRegion(horizon_steps=4, means=found, bound=1.0)
    reach = 0.2 * math.sqrt(19.0)
    assert region.largest_rate(1.0, chance_nats=reach) == pytest.approx(region.largest_rate(1.0))


def test_batches_that_miss_nats_without_a_distance_leave_the_smallest_share():
    region = TrustRegion(horizon_steps=8, bound=BASE)
    for _ in range(10):
        region = region.observe(0.5, {0: 64})
    assert region.largest_rate(BASE) == BASE / 64


def test_a_skipped_step_is_no_distance():
    region = TrustRegion(horizon_steps=8).step(2.0, 2.0).step(0.0)
    assert region.observe(0.1, {2: 1}).means[0].squared_distance == pytest.approx(0.1 * 4.0)
    assert region.bound == 2.0


@given(
    st.lists(st.tuples(st.floats(-0.5, 4.0), st.integers(0, 8)), min_size=1, max_size=30),
    st.floats(0.0, 1.0),
)
def test_the_rate_is_between_the_smallest_share_and_the_base_rate(batches, chance):
    region = TrustRegion(horizon_steps=8)
    for nats, lag in batches:
        region = region.observe(nats, {lag: 10})
        rate = region.largest_rate(BASE, chance)
        assert BASE / 64 <= rate <= BASE
        region = region.step(rate, rate)


@given(st.floats(0.0, 4.0), st.floats(0.0, 4.0), st.floats(0.0, 1.0))
def test_a_batch_that_misses_more_never_allows_more(one, other, chance):
    region = TrustRegion(horizon_steps=4, squared_rates=(1.0,) * 4, bound=1.0)
    less, more = (
        region.observe(nats, {4: 1}).largest_rate(1.0, chance) for nats in sorted((one, other))
    )
    assert more <= less


def test_only_the_steps_of_the_horizon_are_remembered():
    region = TrustRegion(horizon_steps=2)
    for rate in (1.0, 2.0, 3.0):
        region = region.step(rate, rate)
    assert region.squared_rates == (4.0, 9.0)
    assert TrustRegion(horizon_steps=0).step(1.0, 1.0).squared_rates == ()


def test_a_restored_region_allows_what_the_saved_one_did():
    region = TrustRegion(horizon_steps=3)
    for nats in (0.0, 0.3, 0.8, 0.4):
        region = region.observe(nats, {2: 5}).step(BASE / 3, BASE / 2)
    assert region.means[0].missing_nats > 0.0
    state = json.loads(json.dumps(region.to_dict()))
    assert TrustRegion(horizon_steps=3).restore(state) == region
    assert TrustRegion(horizon_steps=1).restore(state).squared_rates == region.squared_rates[-1:]
    assert TrustRegion(horizon_steps=0).restore(state).squared_rates == ()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"squared_rates": 3, "bound": 1.0, "means": []},
        {"squared_rates": [], "bound": 1.0, "means": [3]},
    ],
    ids=str,
)
def test_a_state_of_another_form_is_refused(state):
    with pytest.raises(ValueError, match=r"^state is"):
        TrustRegion(horizon_steps=3).restore(state)


@pytest.mark.parametrize("target", [0.0, 1.0, math.nan])
def test_a_target_that_is_no_share_is_refused_by_name(target):
    with pytest.raises(ValueError, match=r"^target_ess_ratio is"):
        TrustRegion(horizon_steps=3, target_ess_ratio=target)


def test_a_negative_horizon_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^horizon_steps is -1"):
        TrustRegion(horizon_steps=-1)
