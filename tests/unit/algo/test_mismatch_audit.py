import math

import pytest

from vcpo.algo.lag_breakdown import LaggedTrajectory, lag_breakdown
from vcpo.algo.mismatch_audit import MismatchError, audited_gap


def batch(*gaps, lag=0, count=8):
    """Trajectories of two tokens, each token off by a gap in turn."""
    return lag_breakdown(
        [
            LaggedTrajectory(
                lag=lag, log_weight=0.0, num_tokens=2, absolute_log_ratio=2 * gaps[at % len(gaps)]
            )
            for at in range(count)
        ]
    )


def test_the_gap_is_the_mean_over_tokens():
    assert audited_gap(batch(0.01, 0.03), 0.06) == pytest.approx(0.02)


def test_stale_trajectories_say_nothing():
    assert audited_gap(batch(5.0, lag=1), 0.06) is None


def test_a_few_fresh_ones_settle_nothing():
    assert audited_gap(batch(5.0, count=7), 0.06) is None


def test_a_gap_above_the_limit_says_what_to_compare():
    with pytest.raises(MismatchError, match=r"0.41 nats per token on 8 fresh.*temperature"):
        audited_gap(batch(0.41), 0.06)


def test_a_gap_that_is_no_number_is_above_every_limit():
    with pytest.raises(MismatchError, match="differ by nan"):
        audited_gap(batch(math.nan), 0.06)
