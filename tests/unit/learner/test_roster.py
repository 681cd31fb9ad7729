import pytest

from tests.unit.learner.scenes import ManualClock
from vcpo_learner.ledger.worker_registry import (
    WORKER_LOST_AFTER_S,
    Roster,
    WorkerCounts,
    WorkerSeen,
)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def roster(clock):
    roster = Roster(clock)
    roster.enter("first", "main", 3)
    return roster


def names(roster):
    return [worker.worker_id for worker in roster.workers()]


def test_a_worker_is_listed_as_it_last_asked(roster, clock):
    roster.enter("first", "main", 4)
    assert roster.workers() == [
        WorkerSeen(
            worker_id="first", rollout_group="main", policy_version=4, seen_s=clock(), visit=2
        )
    ]


def test_a_worker_not_heard_of_is_no_longer_listed(roster, clock):
    clock.advance(WORKER_LOST_AFTER_S)
    assert names(roster) == ["first"]
    clock.advance(0.001)
    assert names(roster) == []


def test_a_sign_of_life_keeps_a_worker_listed(roster, clock):
    clock.advance(WORKER_LOST_AFTER_S)
    assert roster.confirm("first")
    clock.advance(WORKER_LOST_AFTER_S)
    assert names(roster) == ["first"]


def test_a_worker_that_left_is_confirmed_only_after_it_enters_again(roster):
    roster.leave("first")
    assert not roster.confirm("first")
    assert names(roster) == []
    roster.enter("first", "main", 5)
    assert roster.confirm("first")


def test_lost_workers_take_no_room(roster, clock):
    for number in range(100):
        clock.advance(WORKER_LOST_AFTER_S + 1)
        roster.enter(f"worker-{number}", "main", 0)
    assert len(roster._workers) == 1


def test_accepted_trajectories_add_up_while_a_worker_goes_on_asking(roster):
    roster.confirm("first", num_accepted=3)
    roster.enter("first", "main", 4)
    roster.confirm("first", num_accepted=2)
    assert [worker.accepted_trajectories for worker in roster.workers()] == [5]


def test_a_worker_that_left_begins_with_none_accepted(roster):
    roster.confirm("first", num_accepted=3)
    roster.leave("first")
    roster.enter("first", "main", 4)
    assert [worker.accepted_trajectories for worker in roster.workers()] == [0]


def test_who_invents_workers_drives_out_none_that_delivers(clock):
    roster = Roster(clock, max_workers=3)
    for name in ("delivers", "new"):
        roster.enter(name, "main", 0)
    roster.confirm("delivers", num_accepted=1)
    for number in range(8_214):
        clock.advance(0.001)
        roster.enter(f"invented-{number}", "main", 0)
    assert names(roster) == ["delivers", "invented-8212", "invented-8213"]


def test_trust_comes_with_a_delivery_and_goes_with_a_lease_that_ran_out(roster):
    trust = [roster.workers()[0].trust]
    for change in (lambda: roster.confirm("first", num_accepted=1), lambda: roster.doubt("first")):
        change()
        trust.append(roster.workers()[0].trust)
    roster.enter("first", "main", 4)
    assert [*trust, roster.workers()[0].trust] == ["new", "trusted", "doubted", "doubted"]


def test_a_visit_ends_with_the_next_one(roster):
    visit = roster.enter("first", "main", 3)
    assert roster.confirm("first", visit=visit)
    assert roster.enter("first", "main", 3) == visit + 1
    assert not roster.confirm("first", visit=visit)


def test_counts_of_workers_that_are_gone_stay_in_the_total():
    counts = WorkerCounts(max_workers=2)
    for worker_id, count in (("a", 2), ("a", 5), ("b", 1), ("c", 3)):
        counts.set(worker_id, count)
    assert counts.total == 9
    assert len(counts._counts) == 2
