import struct
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import (
    ManualClock,
    make_ledger,
    make_partial_response,
    make_trajectories,
    make_trajectory,
    prompts,
)
from vcpo.algo.methods import GroupFilter
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.lease_book import GroupBuffer
from vcpo_learner.ledger.ledger import AccountingError, TrajectoryCounts
from vcpo_learner.prompts.source import SequentialPrompts


def grant(ledger, count, *, worker="w", version=0):
    return ledger.grant(worker, num_groups=count, policy_version=version)


def submit_all(ledger, leases, **details):
    for lease in leases:
        ledger.submit(lease.lease_id, make_trajectories(lease, **details))


def restart(ledger, clock):
    """The ledger of another process that began with this ledger's serialized snapshot."""
    data = [part.SerializeToString() for part in ledger.snapshot().parts()]
    other = make_ledger(clock, incarnation="later")
    other.restore([ledger_pb2.LedgerSnapshot.FromString(part) for part in data])
    other.restart()
    return other


def test_the_first_response_under_an_id_is_the_one_that_stays(ledger):
    (lease, _) = leases = grant(ledger, 2)
    ledger.submit(lease.lease_id, [make_trajectory(lease.lease_id, 0, reward=0.25)])
    ledger.submit(lease.lease_id, [make_trajectory(lease.lease_id, 0, reward=0.75)])
    submit_all(ledger, leases)
    batch = ledger.take_batch(step=0, max_policy_lag_steps=1)
    assert [one.reward for one in batch[0].trajectories] == [0.25, 1.0]


def test_a_filter_drops_groups_of_equal_rewards_and_never_grants_their_prompts_again(clock):
    ledger = make_ledger(clock, group_filter=GroupFilter.DYNAMIC_SAMPLING)
    first, second = ledger.grant("w", num_groups=2, policy_version=0)
    ledger.submit(first.lease_id, make_trajectories(first, reward=1.0))
    ledger.submit(
        second.lease_id,
        [make_trajectory(second.lease_id, number, reward=float(number)) for number in range(2)],
    )
    counts = ledger.counts()
    assert (counts.buffered, counts.dropped) == (2, {"no_signal": 2})
    assert [lease.prompt_index for lease in ledger.grant("w", num_groups=1, policy_version=0)] == [
        2
    ]


class Notebook(SequentialPrompts):
    """Counts up to 3 prompts, then has none; notes what it hears."""

    def __init__(self):
        super().__init__()
        self.outcomes = []

    def next_prompt(self, in_flight):
        return None if len(in_flight) == 3 else super().next_prompt(in_flight)

    def observe(self, prompt_index, trajectories):
        self.outcomes.append((prompt_index, [each.reward for each in trajectories]))


@pytest.fixture
def notebook():
    return Notebook()


def test_the_source_hears_of_a_group_once_and_only_when_it_is_whole(clock, notebook):
    ledger = make_ledger(clock, prompt_source=notebook)
    (lease,) = grant(ledger, 1)
    ledger.submit(lease.lease_id, [make_trajectory(lease.lease_id, 0)])
    assert notebook.outcomes == []
    submit_all(ledger, [lease, lease])
    assert notebook.outcomes == [(0, [1.0, 1.0])]


def test_fewer_prompts_are_leased_when_the_source_has_no_more(clock, notebook):
    ledger = make_ledger(clock, prompt_source=notebook)
    first, *_ = leases = grant(ledger, 5)
    assert prompts(leases) == [0, 1, 2]
    assert ledger.counts().leased == 6
    submit_all(ledger, [first])
    assert prompts(grant(ledger, 5)) == [3]


def test_accepted_groups_survive_a_restart_bit_for_bit(ledger, clock):
    (float32,) = struct.unpack("<f", struct.pack("<f", -0.1))
    submit_all(ledger, grant(ledger, 2), versions=(0, 1), reward=0.1, logprob=float32)
    before = sorted(ledger.buffer.groups())
    batch = restart(ledger, clock).take_batch(step=1, max_policy_lag_steps=1)
    assert [group.trajectories for group in batch] == [group.trajectories for group in before]


def sent_by(ledger, lease, worker_id, **details):
    """Submit a lease's trajectories with a name of their own."""
    own = make_trajectories(lease, **details)
    ledger.submit(lease.lease_id, [replace(each, worker_id=worker_id) for each in own])


def test_a_trajectory_has_the_worker_of_its_lease_whatever_it_says_itself(ledger):
    leases = [*grant(ledger, 1, worker="a"), *grant(ledger, 1, worker="b")]
    for lease in leases:
        sent_by(ledger, lease, "another")
    batch = ledger.take_batch(step=0, max_policy_lag_steps=1)
    names = [[each.worker_id for each in group.trajectories] for group in batch]
    assert names == [["a", "a"], ["b", "b"]]


def test_a_response_that_another_worker_began_has_no_worker(ledger):
    (lease,) = grant(ledger, 1, worker="a")
    ledger.release("a", [lease.lease_id], [make_partial_response(0, number=1)])
    leases = grant(ledger, 2, worker="b")
    for lease in leases:
        sent_by(ledger, lease, "b")
    batch = ledger.take_batch(step=0, max_policy_lag_steps=1)
    names = [[each.worker_id for each in group.trajectories] for group in batch]
    assert names == [["b", None], ["b", "b"]]


def test_a_checkpoint_keeps_the_worker_of_what_arrived(ledger, clock):
    whole, open_one = grant(ledger, 2, worker="a")
    sent_by(ledger, whole, "another")
    ledger.submit(open_one.lease_id, make_trajectories(open_one)[:1])
    later = restart(ledger, clock)
    (rest,) = grant(later, 1, worker="b")
    sent_by(later, rest, "another")
    batch = later.take_batch(step=0, max_policy_lag_steps=1)
    names = [[each.worker_id for each in group.trajectories] for group in batch]
    assert names == [["a", "a"], ["a", "b"]]


@pytest.mark.parametrize("part_bytes", [1, 400, 1 << 20])
def test_a_snapshot_in_parts_of_any_size_is_the_same_ledger(ledger, clock, part_bytes):
    submit_all(ledger, grant(ledger, 6))
    grant(ledger, 1)
    parts = list(ledger.snapshot().parts(part_bytes))
    most = 2 * max(part.ByteSize() for part in ledger.snapshot().parts(1))
    assert all(part.ByteSize() < part_bytes + most for part in parts)
    assert (len(parts) > 1) == (part_bytes < 1 << 20)
    later = make_ledger(clock, incarnation="later")
    later.restore(parts)
    assert later.snapshot().groups == ledger.snapshot().groups
    assert later.counts().buffered == ledger.counts().buffered == 12
    later.counts().check()


def test_a_snapshot_does_not_follow_the_ledger(ledger):
    submit_all(ledger, grant(ledger, 2))
    snapshot = ledger.snapshot()
    before = list(snapshot.parts())
    ledger.take_batch(step=0, max_policy_lag_steps=1)
    submit_all(ledger, grant(ledger, 1))
    assert list(snapshot.parts()) == before


def test_counts_that_do_not_add_up_are_an_error_that_shows_them():
    counts = TrajectoryCounts(
        leased=9, in_flight=1, buffered=2, consumed=3, dropped=Counter({"released": 2})
    )
    with pytest.raises(AccountingError, match=r"\(8\).*leased=9"):
        counts.check()


def test_a_batch_that_is_given_back_is_taken_again(ledger):
    submit_all(ledger, grant(ledger, 3))
    batch = ledger.take_batch(step=0, max_policy_lag_steps=1)
    ledger.return_batch(batch)
    counts = ledger.counts()
    counts.check()
    assert (counts.consumed, counts.buffered) == (0, 6)
    assert ledger.take_batch(step=0, max_policy_lag_steps=1) == batch


def test_leases_with_the_newest_tokens_are_preempted_first_and_only_whole(ledger):
    partial, other = grant(ledger, 2, version=3)
    ledger.release("w", [partial.lease_id], [make_partial_response(2)])
    again, newest = grant(ledger, 2, version=3)
    assert again.prompt_index == partial.prompt_index
    ledger.preempt(5)
    assert ledger.preempted_leases("w") == [other.lease_id, newest.lease_id]
    ledger.preempt(4)  # those count
    assert len(ledger.preempted_leases("w")) == 2
    assert ledger.preempted_leases("another") == []


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
