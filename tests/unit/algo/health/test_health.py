import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.fresh_tokens import block, block_of_tokens, blocks, of_workers
from vcpo.algo.health.diagnostics import (
    TokenSums,
    diagnose,
    k3,
    lag_breakdown,
)
from vcpo.algo.health.early_warning import (
    CRITICAL_SCORE,
    WARN_SCORE,
    EarlyWarning,
    StepHealth,
    WarningLevel,
)
from vcpo.algo.health.fresh_tokens import (
    gap_of,
    gap_quantile,
    lower_median,
    scale_error_of,
    without_largest_gaps,
)
from vcpo.algo.health.guards import (
    MAX_ROLLBACKS,
    SMALLEST_BACKOFF,
    GuardPolicy,
    RateBackoff,
    RollbackNeed,
    Rollbacks,
)
from vcpo.algo.health.mismatch_review import REVIEWED_BLOCKS, largest_variance, review


@pytest.mark.parametrize(
    ("lag", "bucket"), [(0, 0), (1, 1), (3, 2), (4, 4), (127, 64), (128, 128), (999, 128)]
)
def test_a_lag_falls_into_the_bucket_that_begins_at_or_below_it(lag, bucket):
    assert lag_breakdown([(lag, 0.0)]) == {bucket: 1.0}


def test_each_bucket_has_its_own_ess_ratio():
    found = lag_breakdown([(2, math.log(3)), (0, 0.0), (3, 0.0), (0, 0.0)])
    assert found == pytest.approx({0: 1.0, 2: 0.8})  # 4^2 / 10 of two
    assert list(found) == [0, 2]


def test_the_gap_is_the_mean_over_tokens_with_the_error_of_its_blocks():
    # 16 tokens of 0.01 and 48 of 0.03: mean 0.025. Blocks differ from it by -0.015 * 16 and
    # 0.005 * 48 nats, -0.24 and 0.24; sqrt(2 * 0.24^2 * 2 / 1) / 64 = 0.0075.
    found = gap_of([block(0.01, num_tokens=16), block(0.03, num_tokens=48)])
    assert (found.value, found.error) == pytest.approx((0.025, 0.0075))
    assert found.least == pytest.approx(0.025 - 3 * 0.0075)


def test_a_single_block_says_nothing_about_its_error():
    assert gap_of([block(0.5)]).least == -math.inf


@pytest.mark.parametrize("bad", [50.0, math.inf], ids=str)
def test_one_broken_block_of_a_pool_is_left_out(bad):
    assert gap_of(without_largest_gaps([*blocks(0.01, 15), block(bad)])).value == pytest.approx(
        0.01
    )


def test_the_largest_of_each_block_show_the_99th_percentile():
    rng = np.random.default_rng(1)
    ratios = rng.standard_t(3, (4096, 32)) * 0.02
    pool = [block_of_tokens(row, -np.ones(32)) for row in ratios]
    assert gap_quantile(pool, 0.99) == pytest.approx(np.quantile(np.abs(ratios), 0.99), rel=0.05)


def test_no_half_of_the_values_raises_the_lower_median_above_another():
    assert lower_median([math.nan, 0.02, math.inf, 0.01]) == 0.02
    assert math.isnan(lower_median([math.nan]))


def test_the_scale_error_is_that_of_a_temperature():
    # softmax(2 z) against softmax(z) over two tokens: r is exactly half of log mu, and a constant.
    logprobs = np.array([-0.5, -1.5, -3.0, -0.1] * 8)
    found = scale_error_of([block_of_tokens(0.02 * logprobs + 0.03, logprobs)] * 3)
    assert found == pytest.approx(0.02)


def test_without_a_spread_of_log_probabilities_there_is_no_scale_error():
    assert scale_error_of([block_of_tokens([0.1, 0.2], [-1.0, -1.0])] * 2) is None
    assert scale_error_of([block_of_tokens([-math.inf, 0.2], [-1.0, -2.0])]) is None


OK, WARN, CRITICAL, DEAD = WarningLevel
LEVELS = st.sampled_from(WarningLevel)
BOUNDS = st.none() | st.sampled_from((WARN, CRITICAL, DEAD))
POLICIES = st.builds(
    GuardPolicy,
    answers_warning=st.booleans(),
    roll_back_from=BOUNDS,
    rolls_back_on_collapse=st.booleans(),
)


def need(policy, level, *, has_collapsed=False, num_rollbacks=0):
    return policy.rollback_need(level, has_collapsed=has_collapsed, num_rollbacks=num_rollbacks)


@given(LEVELS, st.booleans())
def test_a_policy_without_guards_does_nothing(level, has_collapsed):
    policy = GuardPolicy()
    assert not policy.answers(level)
    assert need(policy, level, has_collapsed=has_collapsed) is RollbackNeed.NONE
    assert not policy.lowers_rate


def test_a_collapse_rolls_back_whatever_the_warning_says():
    policy = GuardPolicy(rolls_back_on_collapse=True)
    assert {need(policy, level, has_collapsed=True) for level in WarningLevel} == {RollbackNeed.DUE}
    assert {need(policy, level) for level in WarningLevel} == {RollbackNeed.NONE}


def test_after_two_rollbacks_a_run_goes_on_without():
    policy = GuardPolicy(rolls_back_on_collapse=True)
    needs = [need(policy, CRITICAL, has_collapsed=True, num_rollbacks=n) for n in range(4)]
    assert needs == [RollbackNeed.DUE] * 2 + [RollbackNeed.USED_UP] * 2


def test_a_warning_rolls_back_from_the_level_of_the_policy_on():
    policy = GuardPolicy(roll_back_from=CRITICAL)
    needs = [need(policy, level) for level in WarningLevel]
    assert needs == [RollbackNeed.NONE, RollbackNeed.NONE, RollbackNeed.DUE, RollbackNeed.DUE]


@given(POLICIES, st.lists(st.tuples(LEVELS, st.booleans()), max_size=60))
def test_however_a_run_goes_it_is_rolled_back_at_most_as_often_as_it_may(policy, steps):
    """Every rollback lowers the rate, unless it is at its floor, and no ill step raises it."""
    backoff, rollbacks = RateBackoff(), Rollbacks()
    for version, (level, has_collapsed) in enumerate(steps, 1):
        before = backoff.factor
        backoff = backoff.observe(is_warned=policy.answers(level))
        wanted = need(policy, level, has_collapsed=has_collapsed, num_rollbacks=rollbacks.number)
        if wanted is RollbackNeed.DUE:
            backoff, rollbacks = backoff.after_rollback(), rollbacks.after(version)
            assert backoff.factor == max(SMALLEST_BACKOFF, before / 2)
        assert backoff.factor <= before
    assert rollbacks.number <= MAX_ROLLBACKS
    if not policy.lowers_rate:
        assert backoff.factor == 1.0


@given(POLICIES, LEVELS, st.booleans())
def test_no_checkpoint_is_gone_back_to_that_would_cause_a_rollback_at_once(
    policy, level, has_collapsed
):
    if policy.is_good(level, has_collapsed=has_collapsed):
        assert need(policy, level, has_collapsed=has_collapsed) is RollbackNeed.NONE
        assert not level.is_at_least(CRITICAL)


def test_after_a_rollback_the_lag_may_grow_by_one_version_with_each_step():
    rollbacks = Rollbacks().after(40)
    assert [rollbacks.largest_lag_steps(version) for version in (40, 41, 47)] == [0, 1, 7]
    assert Rollbacks().largest_lag_steps(47) is None


WARNED, WELL = True, False


def factors(*steps):
    backoff, seen = RateBackoff(), []
    for is_warned in steps:
        backoff = backoff.observe(is_warned=is_warned, is_well=not is_warned)
        seen.append(backoff.factor)
    return seen


def test_a_warning_that_lasts_halves_it_again_after_a_window_taken_at_the_lower_rate():
    # The step of the halving, then ten steps at the lower rate, and the next one is judged.
    assert factors(*[WARNED] * 23) == [0.5] * 11 + [0.25] * 11 + [0.125]


def test_the_rate_returns_after_ten_well_steps():
    assert factors(WARNED, *[WELL] * 11) == [0.5] * 10 + [1.0] * 2


def test_each_later_warning_doubles_the_wait():
    # Back after 10 well steps, then after 20, then after 40.
    steps = [WARNED, *[WELL] * 10, WARNED, *[WELL] * 20, WARNED, *[WELL] * 40]
    seen = factors(*steps)
    assert [index for index, factor in enumerate(seen) if factor == 1.0] == [10, 31, 72]


def test_a_step_that_is_neither_warned_nor_well_starts_the_wait_again():
    backoff = RateBackoff().observe(is_warned=True)
    for is_well in [True] * 9 + [False] + [True] * 9:
        backoff = backoff.observe(is_warned=False, is_well=is_well)
    assert backoff.factor == 0.5
    assert backoff.observe(is_warned=False, is_well=True).factor == 1.0


def test_a_false_alarm_costs_nine_steps():
    # Eight steps without a good trajectory, of a run that is well before and after them.
    warning, backoff, lost = EarlyWarning(), RateBackoff(), 0.0
    for relative in [0.9] * 20 + [0.02] * 8 + [0.9] * 100:
        lost += 1.0 - backoff.factor
        warning = warning.observe(StepHealth(relative_ess=relative))
        is_critical = warning.level is WarningLevel.CRITICAL
        is_well = warning.level is WarningLevel.OK
        backoff = backoff.observe(is_warned=is_critical, is_well=is_well)
    assert 0.0 < lost <= 9.0
    assert backoff.factor == 1.0


def test_the_rate_has_a_floor():
    assert factors(*[WARNED] * 500)[-1] == SMALLEST_BACKOFF == 1 / 64


def test_a_rollback_halves_the_rate_also_within_the_window_of_a_warning():
    backoff = RateBackoff().observe(is_warned=True).observe(is_warned=False)
    lowered = backoff.after_rollback()
    assert (lowered.factor, lowered.ceiling, lowered.age_steps) == (0.25, 0.25, 0)


def test_the_rate_does_not_rise_above_what_a_rollback_left():
    backoff = RateBackoff().after_rollback()
    for is_warned in [True, *[False] * 100]:
        backoff = backoff.observe(is_warned=is_warned, is_well=not is_warned)
    assert backoff.factor == backoff.ceiling == 0.5


def test_a_rollback_in_the_step_of_a_halving_does_not_halve_again():
    backoff = RateBackoff().observe(is_warned=True)
    after = backoff.after_rollback()
    assert (after.factor, after.ceiling, backoff.ceiling) == (0.5, 0.5, 1.0)


def warning_after(*relative, warning=None, **numbers):
    warning = warning or EarlyWarning()
    for each in relative:
        warning = warning.observe(StepHealth(relative_ess=each, **numbers))
    return warning


def levels_of(*relative):
    warning, levels = EarlyWarning(), []
    for each in relative:
        warning = warning_after(each, warning=warning)
        levels.append(warning.level)
    return levels


def test_the_mean_weighs_a_step_with_four_fifths_of_the_one_after_it():
    # (0.64 * 0.1 + 0.8 * 0.2 + 0.4) / (0.64 + 0.8 + 1)
    assert warning_after(0.1, 0.2, 0.4).mean == pytest.approx(0.624 / 2.44)


@pytest.mark.parametrize(
    ("relative", "level"),
    [(0.34, WarningLevel.OK), (0.32, WarningLevel.WARN), (0.21, WarningLevel.CRITICAL)],
)
def test_the_level_is_that_of_the_mean(relative, level):
    assert warning_after(*[relative] * 30).level is level


def test_the_first_four_steps_have_no_level():
    assert levels_of(*[0.01] * 5) == [WarningLevel.OK] * 4 + [WarningLevel.CRITICAL]


def test_a_level_ends_at_one_and_a_half_of_its_threshold():
    critical = warning_after(*[0.2] * 60)
    still, warned = (warning_after(*[at] * 60, warning=critical) for at in (0.32, 0.34))
    assert (still.level, warned.level) == (WarningLevel.CRITICAL, WarningLevel.WARN)
    still, well = (warning_after(*[at] * 60, warning=warned) for at in (0.48, 0.51))
    assert (still.level, well.level) == (WarningLevel.WARN, WarningLevel.OK)


def test_a_run_at_a_threshold_does_not_come_and_go():
    levels = levels_of(*[0.9] * 5, *[0.25, 0.4] * 60)
    assert sum(a is not b for a, b in pairwise(levels)) == 1


def test_the_score_tells_the_level():
    for relative in (0.9, 0.3, 0.1, 0.3, 0.4, 0.9, 0.02):
        warning = warning_after(*[relative] * 20)
        again = warning_after(*[0.28] * 20, warning=warning)
        for each in (warning, again):
            is_critical = each.level.is_at_least(WarningLevel.CRITICAL)
            assert is_critical is (each.score >= CRITICAL_SCORE)
            assert each.level.is_at_least(WarningLevel.WARN) is (each.score >= WARN_SCORE)


@pytest.mark.parametrize("numbers", [{"ess": 1.4}, {"gradient_norm": 9e-6}])
def test_ten_steps_in_a_row_without_a_gradient_or_an_ess_are_dead(numbers):
    almost = warning_after(*[0.9] * 9, **numbers)
    assert almost.level is WarningLevel.OK
    assert warning_after(0.9, warning=almost, **numbers).level is WarningLevel.DEAD
    assert warning_after(0.9, 0.9, warning=almost).level is WarningLevel.OK
    assert warning_after(*[0.9] * 20, ess=1.5, gradient_norm=1e-5).level is WarningLevel.OK


def test_a_solved_batch_without_a_gradient_is_not_dead():
    assert warning_after(*[1.0] * 20, gradient_norm=None).level is WarningLevel.OK


@pytest.mark.parametrize("name", ["relative_ess", "ess", "gradient_norm"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        StepHealth(**{"relative_ess": 0.5, name: value})


LOG_1_2_4 = [math.log(weight) for weight in (1, 0.5, 2, 4)]


def diagnosis():
    return diagnose(LOG_1_2_4, TokenSums.of([0.0, math.log(3)]))


def test_trajectories_have_the_ratio_of_their_weights():
    # 7.5^2 / (4 * 21.25)
    assert diagnosis().ess_ratio == pytest.approx(56.25 / 85, rel=1e-12)


def test_tokens_have_ratios_of_their_own():
    # Ratios 1 and 3: 16 / 20
    found = diagnosis()
    assert found.token_ess_ratio == pytest.approx(0.8, rel=1e-12)


def test_the_divergence_is_a_mean_over_tokens():
    assert diagnosis().kl_per_token == pytest.approx((0.0 + 3 - 1 - math.log(3)) / 2)


@given(st.floats(-1e4, 1e4))
def test_no_token_lowers_the_divergence_or_overflows_it(log_ratio):
    assert 0.0 <= k3(log_ratio) < math.exp(20)


LIMIT = 0.06


def review_of(*gaps, count=8):
    """The review of one worker for each gap."""
    shown = {f"worker-{n}": blocks(gap, count, worker=f"worker-{n}") for n, gap in enumerate(gaps)}
    return review(of_workers(**shown), LIMIT)


def names(found):
    return [fault.worker for fault in found.at_fault]


def test_the_gap_is_that_of_the_median_worker():
    found = review_of(0.01, 0.02, 0.03)
    assert found.gap_nats == pytest.approx(0.02)
    assert found.divergence_nats == pytest.approx(0.02**2 / 2)
    assert (found.is_exceeded, found.at_fault) == (False, ())


@pytest.mark.parametrize("count", [0, 7])
def test_a_few_fresh_blocks_settle_nothing(count):
    found = review_of(5.0, count=count)
    assert (found.gap_nats, found.is_exceeded) == (None, False)


@pytest.mark.parametrize("bad", [5.0, math.inf], ids=str)
def test_up_to_a_half_of_the_workers_cannot_end_the_run(bad):
    found = review_of(bad, 0.01, bad, 0.02)
    assert (found.is_exceeded, found.gap_nats) == (False, pytest.approx(0.02))
    assert names(found) == ["worker-0", "worker-2"]


def test_a_majority_of_workers_with_a_gap_ends_the_run():
    found = review_of(0.01, 5.0, 5.0)
    assert (found.is_exceeded, found.gap_nats, found.at_fault) == (True, pytest.approx(5.0), ())


@pytest.mark.parametrize(
    ("gap", "expected"), [(0.05, []), (0.11, ["worker-3"]), (20.0, ["worker-3"])]
)
def test_a_worker_at_ten_times_the_median_is_at_fault(gap, expected):
    found = review_of(0.01, 0.01, 0.01, gap)
    assert names(found) == expected
    for fault in found.at_fault:
        assert fault.gap_nats == pytest.approx(gap)
        assert "temperature" in fault.message


def test_in_float32_a_worker_in_bfloat16_is_at_fault_and_tf32_is_none():
    assert names(review_of(5e-7, 5e-7, 0.004)) == ["worker-2"]
    assert names(review_of(5e-7, 5e-7, 9e-4)) == []


def test_a_worker_is_not_judged_by_a_few_blocks():
    good, bad = of_workers(a=0.01, b=0.01), blocks(20.0, worker="bad")
    assert review([*good, *bad[:7]], LIMIT).at_fault == ()
    assert names(review([*good, *bad], LIMIT)) == ["bad"]


def test_a_worker_that_becomes_bad_is_judged_by_its_newest_blocks():
    shown = of_workers(a=0.01, b=0.01, c=blocks(0.01, 500, worker="c"))
    assert names(review([*shown, *blocks(0.5, 8, worker="c")], LIMIT)) == []
    assert names(review([*shown, *blocks(0.5, REVIEWED_BLOCKS, worker="c")], LIMIT)) == ["c"]


@pytest.mark.parametrize(("limit", "variance"), [(0.002, 1.6e-5), (0.075, 1e-2), (0.3, 1e-2)])
def test_no_more_is_calibrated_away_than_the_limit_allows(limit, variance):
    assert largest_variance(limit) == pytest.approx(variance)


def answers(rng, length, ratio_of, worker="", count=4):
    """Blocks of answers; ratio_of(log mu, position) are the log ratios of a block's tokens."""
    found = []
    for _ in range(count):
        for position in range(0, length, 32):
            logprobs = -rng.exponential(1.5, 32)
            ratios = ratio_of(logprobs, position + np.arange(32))
            found.append(block_of_tokens(ratios, logprobs, position, worker))
    rng.shuffle(found)
    return found


@pytest.mark.parametrize(
    ("ratio_of", "advice"),
    [
        (lambda rng, x, places: rng.normal(0, 0.5, 32), "same at all positions"),
        (lambda rng, x, places: rng.normal(0, (places + 1) / 512), "grows with the position"),
        (lambda rng, x, places: 0.3 * (x + 1.5) + rng.normal(0, 0.002, 32), "the temperature"),
    ],
    ids=["constant", "position", "temperature"],
)
def test_what_to_look_at_follows_from_how_the_gap_is_spread_over_tokens(ratio_of, advice):
    rng = np.random.default_rng(0)
    found = review(answers(rng, 512, lambda x, places: ratio_of(rng, x, places)), LIMIT)
    assert found.is_exceeded
    assert advice in found.message


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_honest=st.integers(1, 5),
    share=st.floats(0.0, 1.0),
    fault=st.sampled_from(["offset", "noise", "temperature", "exact", "impossible"]),
    honest=st.sampled_from([0.01, 0.3]),
)
def test_no_minority_of_the_workers_hides_or_triggers_a_fault_of_the_others(
    seed, num_honest, share, fault, honest
):
    rng = np.random.default_rng(seed)
    num_bad = round(share * (num_honest - 1))

    def bad(logprobs, _):
        match fault:
            case "offset":
                return np.full_like(logprobs, 5.0)
            case "noise":
                return rng.normal(0, 2.0, len(logprobs))
            case "temperature":
                return 0.5 * logprobs
            case "exact":
                return np.zeros_like(logprobs)
            case _:
                return np.where(np.arange(len(logprobs)) == 0, -np.inf, 0.0)

    shown = {f"bad-{n}": answers(rng, 256, bad, f"bad-{n}", 2) for n in range(num_bad)} | {
        f"honest-{n}": answers(
            rng, 256, lambda x, _: rng.normal(0, honest, len(x)), f"honest-{n}", 2
        )
        for n in range(num_honest)
    }
    found = review([each for own in shown.values() for each in own], LIMIT)
    assert found.is_exceeded == (honest > LIMIT)
    assert not any(fault.worker.startswith("honest") for fault in found.at_fault)
    if honest < LIMIT:
        assert len(found.at_fault) == (num_bad if fault != "exact" else 0)
