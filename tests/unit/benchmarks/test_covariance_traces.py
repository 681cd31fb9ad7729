"""Traces of covariance against NumPy's and against sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.covariance_traces import BLOCKS, jackknife, moments, traces


def column(*values: float) -> np.ndarray:
    """A block of one estimator of a number."""
    return np.array(values)[:, None, None]


def test_the_trace_of_a_number_is_its_sample_variance():
    # 0, 2, 4, 6 lie 3, 1, 1, 3 from their mean: 20 / 3.
    measured = moments([column(0.0, 2.0), column(4.0, 6.0)])
    assert traces(measured, [0, 1], 0).raw == pytest.approx([20 / 3])


@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_traces_are_the_summed_variances_of_the_components(blocks, seed):
    drawn = np.random.default_rng(seed).normal(3.0, 2.0, (blocks, 4, 3, 7))
    found = traces(moments(drawn), range(blocks), 0)
    expected = np.var(drawn.reshape(-1, 3, 7), axis=0, ddof=1).sum(axis=1)
    assert found.raw == pytest.approx(expected)


def test_a_block_that_is_left_out_has_no_part():
    measured = moments([column(0.0, 2.0), column(50.0, 90.0), column(4.0, 6.0)])
    assert traces(measured, [0, 2], 0).raw == pytest.approx([20 / 3])


def test_a_shrunk_estimator_is_as_noisy_at_equal_mean_as_the_whole_one():
    whole = np.random.default_rng(0).normal(1.0, 1.0, (4, 8, 1, 5))
    found = traces(moments(np.concatenate([whole, 0.5 * whole], axis=2)), range(4), 0)
    assert found.mean_scale == pytest.approx([1.0, 0.5])
    assert found.raw[1] == pytest.approx(0.25 * found.raw[0])
    assert found.at_equal_mean[1] == pytest.approx(found.at_equal_mean[0])


def test_means_are_multiplied_by_pairs_of_different_samples_only():
    # Reference 1, 3 and other 2, 2: (1 * 3 + 3 * 1) / 2 = 3 and (2 * 3 + 2 * 1) / 2 = 4.
    measured = moments([np.array([[[1.0], [2.0]]]), np.array([[[3.0], [2.0]]])])
    assert traces(measured, [0, 1], 0).mean_scale == pytest.approx([1.0, 4 / 3])


def test_float32_estimates_are_added_up_in_float64():
    large = np.full((1, 1, 1), 2.0**24, dtype=np.float32)
    one = np.ones((1, 1, 1), dtype=np.float32)
    # In float32, 2**24 + 1 is 2**24.
    within = moments([np.concatenate([large, one])]).between[0, 0, 0, 0]
    assert within == (2.0**24 + 1.0) ** 2


def test_the_interval_of_a_geometric_mean_is_that_of_students_t():
    logs = np.random.default_rng(1).normal(0.3, 0.2, BLOCKS)
    found = jackknife(lambda kept: math.exp(np.mean([logs[block] for block in kept])))
    reach = 2.0395 * np.std(logs, ddof=1) / math.sqrt(BLOCKS)
    assert math.log(found.value) == pytest.approx(logs.mean())
    assert math.log(found.low) == pytest.approx(logs.mean() - reach)
    assert math.log(found.high) == pytest.approx(logs.mean() + reach)
