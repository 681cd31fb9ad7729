"""The lag is exactly the configured one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from research.cells.versions import Versions


@given(lag=st.integers(0, 20), step=st.integers(0, 60))
def test_step_s_is_sampled_by_version_s_minus_k_or_the_first(lag, step):
    versions = Versions(lag)
    for _ in range(step + 1):
        versions.add({})
    assert versions.since(lag)[0].number == max(0, step - lag)
    assert versions.newest.number == step


@given(lag=st.integers(0, 20), step=st.integers(0, 60), limit=st.integers(0, 30))
def test_a_lowered_lag_samples_with_a_newer_version_of_those_held(lag, step, limit):
    versions = Versions(lag)
    for _ in range(step + 1):
        versions.add({})
    assert versions.since(limit)[0].number == max(0, step - min(lag, limit))


@given(lag=st.integers(0, 20), step=st.integers(0, 60), age=st.integers(0, 30))
def test_after_a_version_come_all_newer_ones(lag, step, age):
    versions = Versions(lag)
    for _ in range(step + 1):
        versions.add({})
    first = max(0, step - min(lag, age))
    assert [each.number for each in versions.since(age)] == list(range(first, step + 1))
