"""The lag is exactly the configured one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from research.cells.versions import Versions


@given(lag=st.integers(0, 20), step=st.integers(0, 60), age=st.integers(0, 30))
def test_after_a_version_come_all_newer_ones(lag, step, age):
    versions = Versions(lag)
    for _ in range(step + 1):
        versions.add({})
    first = max(0, step - min(lag, age))
    assert [each.number for each in versions.since(age)] == list(range(first, step + 1))
