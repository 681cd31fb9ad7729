import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.fresh_tokens import block_of_tokens, blocks, of_workers
from vcpo.algo.health.mismatch_review import REVIEWED_BLOCKS, largest_variance, review

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
def test_no_half_of_the_workers_hides_or_triggers_a_fault_of_the_others(
    seed, num_honest, share, fault, honest
):
    rng = np.random.default_rng(seed)
    num_bad = round(share * (num_honest - 1 if honest > LIMIT else num_honest))

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
