import math
import random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.algo.ess.finite_batch import finite_batch_law, nats_at_size
from vcpo.algo.ess.importance_weights import ess_ratio


def log_ess_ratios(variance: float, num_weights: int, batches: int) -> list[float]:
    """Log ESS ratios of batches, by the function that reads real ones."""
    rng = random.Random(17)
    return [
        math.log(
            ess_ratio([rng.gauss(-variance / 2, math.sqrt(variance)) for _ in range(num_weights)])
        )
        for _ in range(batches)
    ]


@pytest.mark.parametrize(
    ("variance", "num_weights"), [(0.1, 16), (0.4, 16), (1.0, 16), (1.0, 64), (2.0, 64), (0.3, 700)]
)
def test_batches_scatter_as_the_law_says(variance: float, num_weights: int) -> None:
    logs = log_ess_ratios(variance, num_weights, batches=64_000 // num_weights)
    law = finite_batch_law(variance, num_weights)
    assert law.bias - variance == pytest.approx(fmean(logs), abs=0.05 * variance)
    assert law.deviation == pytest.approx(pstdev(logs), rel=0.15)


@pytest.mark.parametrize("num_weights", [64, 512, 4096])
def test_a_small_variance_has_the_law_of_the_expansion(num_weights: int) -> None:
    # log rho = -(1 - 1/N) v + noise of deviation v sqrt(2 / N), to first order.
    law = finite_batch_law(1e-3, num_weights)
    assert law.deviation == pytest.approx(1e-3 * math.sqrt(2 / num_weights), rel=0.15)
    assert law.bias == pytest.approx(1e-3 / num_weights, abs=1e-3 * math.sqrt(2 / 2**16))


def test_one_weight_is_always_the_whole_batch() -> None:
    law = finite_batch_law(0.7, 1)
    assert (law.bias, law.deviation) == (pytest.approx(0.7), pytest.approx(0.0, abs=1e-12))


def test_engines_that_agree_leave_nothing_to_chance() -> None:
    law = finite_batch_law(0.0, 16)
    assert (law.bias, law.deviation) == (0.0, 0.0)


@settings(max_examples=20)
@given(st.floats(0.0, 100.0), st.integers(1, 5000))
def test_no_batch_shows_more_than_all_of_it_on_average(variance: float, num_weights: int) -> None:
    law = finite_batch_law(variance, num_weights)
    assert 0.0 <= law.bias <= min(variance, 16.0) * (1 + 1e-9)
    assert law.deviation >= 0.0


@settings(max_examples=20)
@given(st.floats(0.01, 0.5), st.integers(16, 1000))
def test_four_times_the_weights_scatter_less_and_show_more_of_the_truth(
    variance: float, num_weights: int
) -> None:
    few, many = finite_batch_law(variance, num_weights), finite_batch_law(variance, 4 * num_weights)
    assert many.bias < few.bias
    assert many.deviation < few.deviation * 1.05


@pytest.mark.parametrize(("variance", "num_weights"), [(-1.0, 4), (math.nan, 4), (1.0, 0)])
def test_numbers_out_of_range_are_refused(variance: float, num_weights: int) -> None:
    with pytest.raises(ValueError, match="give at least 0 and 1"):
        finite_batch_law(variance, num_weights)


@pytest.mark.parametrize(
    ("variance", "size", "other"), [(1.0, 8, 64), (0.5, 64, 16), (1.0, 512, 8)]
)
def test_what_one_size_misses_tells_what_another_would(
    variance: float, size: int, other: int
) -> None:
    missed = {n: -fmean(log_ess_ratios(variance, n, batches=64_000 // n)) for n in (size, other)}
    assert nats_at_size(missed[size], size, other) == pytest.approx(missed[other], rel=0.1)


@given(st.floats(-1.0, 5.0), st.integers(1, 5000))
def test_a_batch_reads_as_itself_at_its_own_size(nats: float, size: int) -> None:
    assert nats_at_size(nats, size, size) == nats


def test_what_chance_adds_to_a_batch_is_left_as_it_is() -> None:
    assert nats_at_size(-0.1, 8, 64) == -0.1


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 1.5), st.floats(0.01, 1.5), st.sampled_from([2, 8, 32, 300]))
def test_who_misses_more_misses_more_at_every_size(one: float, other: float, size: int) -> None:
    less, more = sorted((one, other))
    assert nats_at_size(less, size, 64) <= nats_at_size(more, size, 64) * (1 + 0.02) + 1e-3
