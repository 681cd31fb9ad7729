import pytest

from vcpo.records.reasons import SetAsideCause
from vcpo.records.weight_updates import WeightUpdates
from vcpo_learner.ledger.worker_registry import (
    WORKER_LOST_AFTER_S,
    WorkerRegistry,
)


@pytest.fixture
def registry(clock):
    registry = WorkerRegistry(clock)
    registry.record_request("first", "main", 3)
    return registry


def names(registry):
    return [worker.worker_id for worker in registry.workers()]


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


def test_a_request_is_given_up_with_the_next_one(registry):
    request_number = registry.record_request("first", "main", 3)
    assert registry.record_contact("first", request_number=request_number)
    assert registry.record_request("first", "main", 3) == request_number + 1
    assert not registry.record_contact("first", request_number=request_number)


def test_another_process_of_a_name_begins_anew(registry):
    registry.record_contact("first", num_accepted=3)
    registry.record_request("first", "main", 3, process_id="later")
    (worker,) = registry.workers()
    assert (worker.accepted_trajectories, worker.request_number) == (0, 1)


def test_counts_of_processes_that_are_gone_stay_in_the_total(registry):
    for process_id, in_flight, merged in (("a", 2, 1), ("a", 5, 1), ("b", 1, 0), ("c", 3, 4)):
        counts = WeightUpdates(in_flight=in_flight, merged=merged)
        registry.record_request("w", "main", 0, process_id=process_id, weight_updates=counts)
    assert registry.weight_updates == WeightUpdates(in_flight=9, merged=5)


def test_a_process_that_was_set_aside_stays_so_and_the_next_one_of_its_name_does_not(registry):
    registry.record_request("w", "main", 0, process_id="bad")
    told = registry.set_aside("w", SetAsideCause.FAILING, "it fails")
    assert told.sentence == "failing: it fails"
    assert "w" not in names(registry)
    registry.record_request("w", "main", 0, process_id="good")
    assert registry.set_aside_process("bad") is told
    assert registry.set_aside_process("good") is None
    assert list(registry.latest_set_aside) == [told]
    assert registry.num_set_aside == {SetAsideCause.FAILING: 1}
