import math

import pytest

from vcpo.algo.health.mismatch_audit import FreshTokens, MismatchError, audited_gap


def fresh(gap, *, num_pieces=8, num_tokens=160):
    return FreshTokens(
        num_pieces=num_pieces, num_tokens=num_tokens, absolute_log_ratio=gap * num_tokens
    )


def test_the_gap_is_the_mean_over_tokens():
    assert audited_gap(fresh(0.02), 0.06) == pytest.approx(0.02)


def test_without_fresh_tokens_nothing_is_said():
    assert audited_gap(FreshTokens(), 0.06) is None


def test_a_few_fresh_pieces_settle_nothing():
    assert audited_gap(fresh(5.0, num_pieces=7), 0.06) is None


def test_a_gap_above_the_limit_says_what_to_compare():
    with pytest.raises(MismatchError, match=r"0.41 nats per token on 160 fresh.*temperature"):
        audited_gap(fresh(0.41), 0.06)


def test_a_gap_that_is_no_number_is_above_every_limit():
    with pytest.raises(MismatchError, match="differ by nan"):
        audited_gap(fresh(math.nan), 0.06)
