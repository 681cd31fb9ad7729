"""The newest buffered responses, which calibrate the learner beside a batch."""

from tests.fixtures.learner.dispatcher import ManualClock, make_ledger, make_trajectories


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
    assert [one.num_tokens_of(2) for one in ledger.newest_trajectories(2, num_tokens=3)] == [1, 2]
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
