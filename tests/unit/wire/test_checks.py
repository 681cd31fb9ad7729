"""Checks that services share name the field, the value and the bounds."""

from __future__ import annotations

import pytest

from vcpo.wire.errors import InvalidMessageError, check_id, check_wait


@pytest.mark.parametrize("size", [1, 256])
def test_an_id_within_bounds_is_accepted(size):
    check_id("worker_id", "w" * size)


def test_an_id_may_not_be_empty():
    with pytest.raises(
        InvalidMessageError, match=r"^worker_id: must be 1 to 256 characters, got ''$"
    ):
        check_id("worker_id", "")


@pytest.mark.parametrize("wait_s", [0.0, 0.5, 30.0])
def test_a_wait_within_bounds_is_returned(wait_s):
    assert check_wait("wait_seconds", wait_s) == wait_s


@pytest.mark.parametrize("wait_s", [-0.1, 30.1, float("nan"), float("inf")])
def test_a_wait_outside_is_named(wait_s):
    with pytest.raises(InvalidMessageError, match=r"^wait_seconds: must be 0 to 30 seconds, got "):
        check_wait("wait_seconds", wait_s)
