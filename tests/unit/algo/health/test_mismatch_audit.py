import math

import pytest

from vcpo.algo.health.mismatch_audit import FreshTokens, MismatchError, audit_mismatch


def fresh(*gaps, num_blocks=8, num_tokens=160):
    """Fresh tokens of one worker for each gap."""
    return {
        f"worker-{number}": FreshTokens(
            num_blocks=num_blocks, num_tokens=num_tokens, absolute_log_ratio=each * num_tokens
        )
        for number, each in enumerate(gaps)
    }


def test_the_gap_is_the_mean_over_tokens():
    assert audit_mismatch(fresh(0.02), 0.06) == pytest.approx(0.02)


def test_without_fresh_tokens_nothing_is_said():
    assert audit_mismatch({}, 0.06) is None


def test_a_few_fresh_blocks_settle_nothing():
    assert audit_mismatch(fresh(5.0, num_blocks=7), 0.06) is None


def test_a_gap_above_the_limit_says_what_to_compare():
    with pytest.raises(MismatchError, match=r"0.41 nats per token on 160 fresh.*temperature"):
        audit_mismatch(fresh(0.41), 0.06)


def test_a_gap_that_is_no_number_is_above_every_limit():
    with pytest.raises(MismatchError, match="differ by nan"):
        audit_mismatch(fresh(math.nan), 0.06)


@pytest.mark.parametrize("bad", [5.0, math.inf, math.nan], ids=str)
def test_up_to_a_half_of_the_workers_cannot_end_the_run(bad):
    assert audit_mismatch(fresh(bad, 0.01, bad, 0.02), 0.06) == pytest.approx(0.02)


def test_a_majority_of_workers_with_a_gap_ends_the_run():
    with pytest.raises(MismatchError, match="differ by 5 nats"):
        audit_mismatch(fresh(0.01, 5.0, 5.0), 0.06)


@pytest.mark.parametrize(
    ("gaps", "num_awaited"), [((5.0,), 1), ((5.0,), 2), ((5.0, 5.0), 2), ((math.nan, 5.0), 3)]
)
def test_workers_that_come_first_do_not_end_the_run_while_as_many_are_awaited(gaps, num_awaited):
    assert audit_mismatch(fresh(*gaps), 0.06, num_awaited=num_awaited) is None


@pytest.mark.parametrize(("gaps", "num_awaited"), [((5.0, 5.0), 1), ((5.0,) * 4, 3)])
def test_a_majority_of_all_workers_with_a_gap_is_not_left_waiting(gaps, num_awaited):
    with pytest.raises(MismatchError, match="differ by 5 nats"):
        audit_mismatch(fresh(*gaps), 0.06, num_awaited=num_awaited)


def test_a_gap_of_rounding_is_told_whoever_is_awaited():
    assert audit_mismatch(fresh(0.02), 0.06, num_awaited=7) == pytest.approx(0.02)


def test_a_few_blocks_of_each_worker_are_enough_together():
    assert audit_mismatch(fresh(0.01, 0.02, num_blocks=4), 0.06) == pytest.approx(0.01)
