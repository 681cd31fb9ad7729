import pytest

from tests.unit.learner.scenes import ManualClock
from vcpo_learner.roster import WORKER_LOST_AFTER_S, Roster, WorkerSeen


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
        WorkerSeen(worker_id="first", rollout_group="main", policy_version=4, seen_s=clock())
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
