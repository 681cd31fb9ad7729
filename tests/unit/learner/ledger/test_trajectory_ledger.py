import struct
from collections import Counter
from dataclasses import replace

import pytest

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
from vcpo_learner.ledger.ledger import AccountingError, TrajectoryCounts
from vcpo_learner.prompts.source import SequentialPrompts


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def ledger(clock):
    return make_ledger(clock)


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


def test_one_response_sent_twice_in_one_submission_counts_once(ledger):
    (lease,) = grant(ledger, 1)
    twice = [make_trajectory(lease.lease_id, 1)] * 2
    assert ledger.submit(lease.lease_id, twice) == ["accepted", "duplicate"]


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


def test_requeued_prompts_are_granted_though_the_source_has_none(clock, notebook):
    ledger = make_ledger(clock, prompt_source=notebook)
    leases = grant(ledger, 3)
    ledger.release("w", [leases[1].lease_id])
    assert prompts(grant(ledger, 1)) == [1]


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
