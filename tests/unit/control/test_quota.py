"""The share of the leases that one worker may hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.control.quota import LeaseHolders, Trust, quota_trajectories


def quota(trust, *, held=0, places=64, group=8, **holders):
    counts = {"budget": 256, "num_trusted": 2, "num_new": 4, "held_by_untrusted": 0, **holders}
    return quota_trajectories(LeaseHolders(**counts), trust, places=places, held=held, group=group)


@pytest.mark.parametrize(("held", "more"), [(0, 64), (40, 24), (64, 0), (80, 0)])
def test_who_delivers_may_fill_its_places(held, more):
    assert quota(Trust.TRUSTED, held=held, held_by_untrusted=1000) == more


def test_newcomers_share_half_of_what_may_be_in_flight():
    assert quota(Trust.NEW) == 128 // 4
    assert quota(Trust.NEW, held=20, held_by_untrusted=20) == 12
    assert quota(Trust.NEW, held_by_untrusted=120) == 8


def test_newcomers_share_all_of_it_while_nobody_has_delivered():
    assert quota(Trust.NEW, num_trusted=0, places=1000) == 256 // 4
    assert quota(Trust.NEW, num_trusted=0, num_new=1, places=1000) == 256


def test_a_newcomer_among_many_may_still_have_a_group():
    assert quota(Trust.NEW, num_new=1000) == 8


def test_who_let_a_lease_run_out_has_one_group_at_a_time():
    assert quota(Trust.DOUBTED) == 8
    assert quota(Trust.DOUBTED, held=8, held_by_untrusted=8) == 0


@given(st.integers(0, 500), st.integers(1, 60), st.lists(st.integers(0, 39), max_size=300))
def test_whoever_asks_in_whatever_order_workers_that_deliver_keep_half(budget, num_new, askers):
    held = dict.fromkeys(range(40), 0)
    for asker in askers:
        total = sum(held.values())
        held[asker] += quota(
            Trust.NEW, held=held[asker], budget=budget, num_new=num_new, held_by_untrusted=total
        )
        assert sum(held.values()) <= budget // 2
