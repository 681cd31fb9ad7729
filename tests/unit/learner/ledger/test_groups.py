"""The buffer's order of consumption, what is late in it, and which of it calibrates a step."""

from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import (
    ManualClock,
    make_ledger,
    make_trajectories,
    make_trajectory,
)
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.lease_book import GroupBuffer

BUFFERED = st.lists(st.integers(0, 12), max_size=40)
"""The oldest version of each group, by its grant."""


def group(grant_number, version):
    lease_id = f"lease-{grant_number}"
    return Lease(
        grant_number=grant_number,
        group_number=grant_number,
        lease_id=lease_id,
        worker_id="w",
        prompt_index=grant_number,
        accepted={
            0: make_trajectory(lease_id, 0, versions=(version + 1, version)),
            1: make_trajectory(lease_id, 1, versions=(version + 2,)),
        },
    )


def filled(versions, *, prompts_per_step, arrival):
    buffer = GroupBuffer(prompts_per_step=prompts_per_step)
    groups = [group(number, version) for number, version in enumerate(versions)]
    arrival.shuffle(groups)
    buffer.add(groups)
    return buffer


@given(BUFFERED, st.integers(1, 5), st.integers(0, 12), st.integers(0, 4), st.randoms())
def test_late_is_what_the_next_steps_one_by_one_would_find_too_old(
    versions, prompts_per_step, policy_version, max_policy_lag_steps, arrival
):
    buffer = filled(versions, prompts_per_step=prompts_per_step, arrival=arrival)
    late, taken = [], 0
    for version, grant_number in sorted(zip(versions, range(len(versions)), strict=True)):
        consumed_at = policy_version + taken // prompts_per_step
        if consumed_at - version > max_policy_lag_steps:
            late.append(grant_number)
        else:
            taken += 1
    found = buffer.late(step=policy_version, max_policy_lag_steps=max_policy_lag_steps)
    assert [each.grant_number for each in found] == sorted(late)


@given(BUFFERED, st.integers(1, 5), st.randoms())
def test_the_oldest_tokens_go_first_and_then_the_earliest_grants(
    versions, prompts_per_step, arrival
):
    buffer = filled(versions, prompts_per_step=prompts_per_step, arrival=arrival)
    order = sorted(range(len(versions)), key=lambda number: (versions[number], number))
    assert [each.grant_number for each in buffer.groups()] == order
    while (batch := buffer.take_batch()) is not None:
        assert [each.group_number for each in batch] == sorted(order[:prompts_per_step])
        del order[:prompts_per_step]
        assert buffer.num_trajectories == 2 * len(order)
    assert len(order) < prompts_per_step


@given(BUFFERED, st.sets(st.integers(0, 45)), st.integers(0, 12), st.randoms())
def test_groups_that_were_removed_delay_no_others(versions, removed, policy_version, arrival):
    buffer = filled(versions, prompts_per_step=2, arrival=arrival)
    gone = buffer.remove([f"lease-{number}" for number in removed])
    assert [each.grant_number for each in gone] == [one for one in removed if one < len(versions)]
    rest = GroupBuffer(prompts_per_step=2)
    rest.add(group(n, version) for n, version in enumerate(versions) if n not in removed)
    limits = {"step": policy_version, "max_policy_lag_steps": 1}
    assert buffer.groups() == rest.groups()
    assert buffer.num_trajectories == rest.num_trajectories
    assert buffer.late(**limits) == rest.late(**limits)


def fill_buffer(ledger, *versions_of_groups):
    """A ledger's buffer with a group of two responses for each tuple of versions."""
    leases = ledger.grant("w", num_groups=len(versions_of_groups), policy_version=0)
    for lease, versions in zip(leases, versions_of_groups, strict=True):
        ledger.submit(lease.lease_id, make_trajectories(lease, versions=versions))
    return leases


def test_the_newest_responses_are_those_with_tokens_of_a_version_one_of_each_prompt_first():
    ledger = make_ledger(ManualClock())
    _, first, second = fill_buffer(ledger, (2, 2), (2, 3), (3, 3))
    ids = [one.trajectory_id for one in ledger.newest_trajectories(3, num_tokens=100)]
    assert ids == [f"{lease.lease_id}/{n}" for n in (0, 1) for lease in (second, first)]
    assert ledger.newest_trajectories(4, num_tokens=100) == []
    assert [one.num_fresh_tokens(2) for one in ledger.newest_trajectories(2, num_tokens=3)] == [
        1,
        2,
    ]
    assert ledger.counts().buffered == 6


def test_the_newest_responses_are_as_few_as_have_the_tokens_wanted():
    ledger = make_ledger(ManualClock())
    fill_buffer(ledger, (3, 3), (3, 3))
    sizes = [len(ledger.newest_trajectories(3, num_tokens=wanted)) for wanted in (0, 1, 2, 3, 4, 5)]
    assert sizes == [0, 1, 1, 2, 2, 3]


def test_responses_of_a_group_that_is_not_complete_are_among_the_newest():
    ledger = make_ledger(ManualClock())
    (lease,) = ledger.grant("w", num_groups=1, policy_version=3)
    ledger.submit(lease.lease_id, make_trajectories(lease, versions=(3,))[:1])
    assert len(ledger.newest_trajectories(3, num_tokens=9)) == 1
