import pytest

from tests.fixtures.learner.dispatcher import ManualClock
from vcpo.control.quota import Trust
from vcpo.records.weight_updates import WeightUpdates
from vcpo_learner.ledger.worker_registry import (
    WORKER_LOST_AFTER_S,
    RegisteredWorker,
    WorkerCounters,
    WorkerRegistry,
)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def registry(clock):
    registry = WorkerRegistry(clock)
    registry.record_request("first", "main", 3)
    return registry


def names(registry):
    return [worker.worker_id for worker in registry.workers()]


def test_a_worker_is_listed_by_its_last_request(registry, clock):
    registry.record_request("first", "main", 4)
    assert registry.workers() == [
        RegisteredWorker(
            worker_id="first",
            rollout_group="main",
            policy_version=4,
            last_seen_s=clock(),
            request_number=2,
        )
    ]


def test_the_trust_in_a_worker_is_that_of_the_list_and_that_in_a_new_one_if_it_is_not_there(
    registry, clock
):
    registry.record_contact("first", num_accepted=1)
    registry.record_weights_call("silent")
    assert {each.worker_id: each.trust for each in registry.workers()} == {"first": Trust.TRUSTED}
    asked = [registry.trust_of(name) for name in ("first", "silent", "unknown")]
    assert asked == [Trust.TRUSTED, Trust.NEW, Trust.NEW]
    registry.mark_doubted("first")
    assert registry.trust_of("first") is Trust.DOUBTED
    clock.advance(WORKER_LOST_AFTER_S + 0.001)
    assert registry.trust_of("first") is Trust.NEW


def test_a_lost_worker_is_no_longer_listed(registry, clock):
    clock.advance(WORKER_LOST_AFTER_S)
    assert names(registry) == ["first"]
    clock.advance(0.001)
    assert names(registry) == []


def test_a_sign_of_life_keeps_a_worker_listed(registry, clock):
    clock.advance(WORKER_LOST_AFTER_S)
    assert registry.record_contact("first")
    clock.advance(WORKER_LOST_AFTER_S)
    assert names(registry) == ["first"]


def test_a_deregistered_worker_counts_again_only_after_its_next_request(registry):
    registry.deregister("first")
    assert not registry.record_contact("first")
    assert names(registry) == []
    registry.record_request("first", "main", 5)
    assert registry.record_contact("first")


def test_lost_workers_take_no_room(registry, clock):
    for number in range(100):
        clock.advance(WORKER_LOST_AFTER_S + 1)
        registry.record_request(f"worker-{number}", "main", 0)
    assert len(registry._workers) == 1


def test_accepted_trajectories_add_up_while_a_worker_makes_requests(registry):
    registry.record_contact("first", num_accepted=3)
    registry.record_request("first", "main", 4)
    registry.record_contact("first", num_accepted=2)
    assert [worker.accepted_trajectories for worker in registry.workers()] == [5]


def test_a_deregistered_worker_begins_with_none_accepted(registry):
    registry.record_contact("first", num_accepted=3)
    registry.deregister("first")
    registry.record_request("first", "main", 4)
    assert [worker.accepted_trajectories for worker in registry.workers()] == [0]


def test_who_invents_workers_drives_out_none_that_delivers(clock):
    registry = WorkerRegistry(clock, max_workers=3)
    for name in ("delivers", "new"):
        registry.record_request(name, "main", 0)
    registry.record_contact("delivers", num_accepted=1)
    for number in range(8_214):
        clock.advance(0.001)
        registry.record_request(f"invented-{number}", "main", 0)
    assert names(registry) == ["delivers", "invented-8212", "invented-8213"]


def test_trust_comes_with_a_delivery_and_goes_with_a_lease_that_ran_out(registry):
    trust = [registry.workers()[0].trust]
    for change in (
        lambda: registry.record_contact("first", num_accepted=1),
        lambda: registry.mark_doubted("first"),
    ):
        change()
        trust.append(registry.workers()[0].trust)
    registry.record_request("first", "main", 4)
    assert [*trust, registry.workers()[0].trust] == ["new", "trusted", "doubted", "doubted"]


def test_a_request_is_given_up_with_the_next_one(registry):
    request_number = registry.record_request("first", "main", 3)
    assert registry.record_contact("first", request_number=request_number)
    assert registry.record_request("first", "main", 3) == request_number + 1
    assert not registry.record_contact("first", request_number=request_number)


def test_a_worker_that_only_fetches_weights_is_known_and_no_worker_yet(registry):
    registry.record_weights_call("second")
    assert registry.is_alive("second")
    assert not registry.record_contact("second", num_accepted=1)
    assert names(registry) == ["first"]
    registry.record_request("second", "main", 3)
    assert names(registry) == ["first", "second"]


def test_a_worker_that_fetches_weights_while_it_generates_is_not_lost(registry, clock):
    registry.record_contact("first", num_accepted=1)
    clock.advance(WORKER_LOST_AFTER_S)
    registry.record_weights_call("first")
    clock.advance(WORKER_LOST_AFTER_S)
    assert [worker.trust for worker in registry.workers()] == ["trusted"]


def test_counts_of_workers_that_are_gone_stay_in_the_total():
    counts = WorkerCounters(max_workers=2)
    for worker_id, in_flight, merged in (("a", 2, 1), ("a", 5, 1), ("b", 1, 0), ("c", 3, 4)):
        counts.set(worker_id, WeightUpdates(in_flight=in_flight, merged=merged))
    assert counts.total == WeightUpdates(in_flight=9, merged=5)
    assert len(counts._counts) == 2
