"""Bucket edges: no quantile that Prometheus computes exceeds what a run's spec allows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.metrics.learner import lag_edges

LARGEST_LAG = 1024
"""As the spec allows."""
lags = st.integers(0, LARGEST_LAG).flatmap(
    lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1, max_size=200))
)


def histogram_quantile(quantile: float, edges: Sequence[float], values: Sequence[float]) -> float:
    """What Prometheus computes of a classic histogram: promql/quantile.go, bucketQuantile."""
    bounds = [*edges, float("inf")]
    counts = [sum(value <= bound for value in values) for bound in bounds]
    rank = quantile * counts[-1]
    bucket = bisect_left(counts, rank)
    if bucket == len(bounds) - 1:
        return bounds[-2]
    if bucket == 0 and bounds[0] <= 0:
        return bounds[0]
    start = bounds[bucket - 1] if bucket else 0.0
    below = counts[bucket - 1] if bucket else 0
    inside = counts[bucket] - below
    return start + (bounds[bucket] - start) * ((rank - below) / inside)


@given(lags)
def test_the_computed_p95_never_exceeds_the_largest_lag(case):
    largest, seen = case
    assert histogram_quantile(0.95, lag_edges(largest), seen) <= largest


def test_the_edges_that_ignored_the_bound_gave_a_p95_above_it():
    powers = (0, 1, 2, 4, 8, 16, 32, 64, 128)
    assert histogram_quantile(0.95, powers, [6] * 100) == pytest.approx(7.8)
    assert histogram_quantile(0.95, lag_edges(6), [6] * 100) == pytest.approx(5.95)


@given(st.integers(0, LARGEST_LAG))
def test_there_are_at_most_12_whole_ascending_edges_from_0_to_the_largest_lag(largest):
    edges = lag_edges(largest)
    assert len(edges) <= 12
    assert (edges[0], edges[-1]) == (0, largest)
    assert list(edges) == sorted(set(edges))
    assert all(edge == int(edge) for edge in edges)


@given(st.integers(0, LARGEST_LAG))
def test_every_limit_that_halving_reaches_is_an_edge(largest):
    limit = largest
    while limit:
        assert limit in lag_edges(largest)
        limit //= 2
