import math

import pytest

from vcpo.algo.health.mismatch_audit import FreshTokens, MismatchError, audit_mismatch


def fresh(gap, *, num_blocks=8, num_tokens=160):
    return FreshTokens(
        num_blocks=num_blocks, num_tokens=num_tokens, absolute_log_ratio=gap * num_tokens
    )


def test_the_gap_is_the_mean_over_tokens():
    assert audit_mismatch(fresh(0.02), 0.06) == pytest.approx(0.02)


def test_without_fresh_tokens_nothing_is_said():
    assert audit_mismatch(FreshTokens(), 0.06) is None


def test_a_few_fresh_blocks_settle_nothing():
    assert audit_mismatch(fresh(5.0, num_blocks=7), 0.06) is None


def test_a_gap_above_the_limit_says_what_to_compare():
    with pytest.raises(MismatchError, match=r"0.41 nats per token on 160 fresh.*temperature"):
        audit_mismatch(fresh(0.41), 0.06)


def test_a_gap_that_is_no_number_is_above_every_limit():
    with pytest.raises(MismatchError, match="differ by nan"):
        audit_mismatch(fresh(math.nan), 0.06)
