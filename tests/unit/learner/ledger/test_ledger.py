"""A run whose environment never works ends soon; one that worked survives a short outage."""

import asyncio
from dataclasses import replace

import pytest

from tests.fixtures.learner.dispatcher import (
    TIMEOUT_S,
    ManualClock,
    dispatcher_fixture,
    make_partial_response,
    make_run,
    make_trajectories,
    make_trajectory,
    settle,
    work_request,
)
from vcpo.records.reasons import SetAsideCause, WeightUpdates
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.failures import Failure, FailureCause
from vcpo.wire.trajectory import FinishReason, prompt_checksum
from vcpo_learner.ledger import lease_book
from vcpo_learner.ledger import ledger as ledger_module
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.lease_book import LeaseBook
from vcpo_learner.ledger.workers import (
    WORKER_LOST_AFTER_S,
    FailureWatch,
    TooManyFailuresError,
    WorkerRegistry,
)
from vcpo_learner.troubles import TOLERANCE_S, Troubles

RUN = {
    "steps": 1000,
    "batch": {"promptsPerStep": 8, "trajectoriesPerPrompt": 2},
    "algorithm": {"maxPolicyLagSteps": 3},
    "rollouts": [{"name": "main", "maxConcurrentSequences": 16}],
}


async def take_leases(fixture, worker_id, **request):
    return await fixture.dispatcher.lease(work_request(worker_id=worker_id, **request), wait_s=0)


async def test_leases_of_a_lost_reply_go_to_others_when_the_worker_asks_again():
    fixture = dispatcher_fixture(**RUN)
    first, *lost = await take_leases(fixture, "w", room=16)
    known = frozenset({first.lease_id})
    request = replace(work_request(room=2), held_lease_ids=known)
    (again,) = await fixture.dispatcher.lease(request, wait_s=0)
    assert again.prompt_index == lost[0].prompt_index
    assert fixture.ledger.leases.in_flight_by_worker() == {"w": 4}


async def test_a_request_is_given_up_when_its_worker_asks_again():
    fixture = dispatcher_fixture(**RUN)
    for worker in ("a", "b", "c", "d"):
        await take_leases(fixture, worker)
    waiting = [
        asyncio.create_task(fixture.dispatcher.lease(work_request(worker_id="w"), wait_s=30))
        for _ in range(3)
    ]
    await settle()
    fixture.dispatcher.notify()
    await settle()
    assert [task.done() for task in waiting] == [True, True, False]
    waiting[-1].cancel()


UNDER_WAY = make_partial_response(0, 1)
COMPLETE = make_partial_response(1, finish_reason=FinishReason.STOP, number=1)


def test_more_responses_than_the_lease_wants_are_refused(ledger):
    (lease,) = ledger.grant("w", num_groups=1, policy_version=1)
    with pytest.raises(InvalidMessageError, match="begun: must be at most 2 responses"):
        ledger.release("w", [lease.lease_id], [UNDER_WAY] * 3)
    assert ledger.counts().in_flight == 2


def test_grants_stop_before_a_message_grows_too_large(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "MAX_PARTIAL_TOKENS", 3)
    for lease in ledger.grant("w", num_groups=3, policy_version=1):
        ledger.release("w", [lease.lease_id], [UNDER_WAY])
    first = ledger.grant("w", num_groups=3, policy_version=1)
    assert [lease.prompt_index for lease in first] == [0]
    assert [lease.prompt_index for lease in ledger.grant("w", num_groups=1, policy_version=1)] == [
        1
    ]


async def test_a_token_at_the_bound_may_still_be_trained_on_and_an_older_one_not():
    # Two batches are consumed and the lag limit is 1: the next may train on tokens of version 1.
    fixture = dispatcher_fixture()
    old, young = await fixture.dispatcher.lease(work_request(room=4), wait_s=0)
    for version in (0, 1):
        for lease in fixture.ledger.grant("w", num_groups=2, policy_version=version):
            fixture.ledger.submit(lease.lease_id, make_trajectories(lease, versions=(version,)))
        assert fixture.ledger.take_batch(step=version, max_policy_lag_steps=1)
    fixture.dispatcher.policy_version = 2
    for partial, assignment in ((UNDER_WAY, old), (COMPLETE, young)):
        fixture.dispatcher.release("w", [assignment.lease_id], [partial])
    again = await fixture.dispatcher.lease(work_request(held=2, room=4), wait_s=0)
    assert [one.partial_responses for one in again] == [(), (COMPLETE,)]


async def test_a_version_that_does_not_exist_yet_is_refused():
    fixture = dispatcher_fixture()
    (assignment,) = await fixture.dispatcher.lease(work_request(room=2), wait_s=0)
    with pytest.raises(InvalidMessageError, match=r"begun\[0\]\.version_spans"):
        fixture.dispatcher.release("w", [assignment.lease_id], [make_partial_response(1)])


WHY = SetAsideCause.MISMATCH, "0.4 nats a token off"


@pytest.fixture
def fixture():
    """A run whose batch has 4 prompts of 2 trajectories."""
    return dispatcher_fixture(batch={"promptsPerStep": 4, "trajectoriesPerPrompt": 2})


async def test_a_lease_is_sampled_with_the_same_seed_however_many_workers_lose_it(fixture):
    (held,) = await take_leases(fixture, "bad-0", room=2)
    for number in range(3):
        fixture.dispatcher.set_aside(f"bad-{number}", *WHY)
        (again,) = await take_leases(fixture, f"bad-{number + 1}", room=2)
        assert again.seed(7) == held.seed(7)


async def test_it_gets_no_more_work_not_even_what_it_waits_for(fixture):
    # Each worker may hold what admission leaves: 8 trajectories a step, and a lag of 1.
    await take_leases(fixture, "good", room=200)
    waiting = asyncio.create_task(
        fixture.dispatcher.lease(work_request(worker_id="bad"), wait_s=30.0)
    )
    await asyncio.sleep(0)
    fixture.dispatcher.set_aside("bad", *WHY)
    assert await waiting == []
    fixture.dispatcher.release("good", ())
    assert [each.worker_id for each in fixture.dispatcher.registry.workers()] == []
    assert await take_leases(fixture, "good", room=2) != []


async def test_held_out_prompts_that_it_holds_are_granted_again():
    fixture = dispatcher_fixture(evaluation={"prompts": 1, "everySteps": 100})
    round_ = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=True))
    await asyncio.sleep(0)
    await take_leases(fixture, "bad", room=2)
    fixture.dispatcher.set_aside("bad", *WHY)
    (again,) = await take_leases(fixture, "good", room=2)
    fixture.submit(again, worker_id="good")
    result = await round_
    assert result is not None
    assert result.record.num_trajectories == 1


@pytest.fixture
def book():
    return LeaseBook(prefix="train-now", timeout_s=TIMEOUT_S, clock=ManualClock())


def lease_of(book, *numbers, worker_id="w", **prompt):
    return book.open(
        Lease(**{"prompt_index": 0, **prompt}),
        worker_id=worker_id,
        response_numbers=numbers,
        policy_version=0,
    )


def submit(book, lease_id, trajectories):
    lease = book.get(lease_id)
    if lease is None:
        return [book.outcome_when_closed(lease_id)] * len(trajectories)
    return book.accept(lease, trajectories)


def test_a_book_knows_its_own_ids_by_their_form(book):
    lease = lease_of(book, 0)
    book.close(lease.lease_id)
    assert book.has_issued(lease.lease_id)
    assert not book.has_issued("train-nowhere-0")


def test_the_memory_of_fulfilled_leases_is_bounded(book, monkeypatch):
    monkeypatch.setattr(lease_book, "_REMEMBERED_LEASES", 2)
    closed = [lease_of(book, 0) for _ in range(3)]
    for lease in closed:
        submit(book, lease.lease_id, make_trajectories(lease))
    outcomes = [submit(book, lease.lease_id, make_trajectories(lease))[0] for lease in closed]
    assert outcomes == ["lease_ended", "duplicate", "duplicate"]


def test_all_responses_of_a_lease_are_to_one_prompt(book):
    lease = lease_of(book, 0, 1)
    submit(book, lease.lease_id, [make_trajectory(lease.lease_id, 0)])
    other = replace(make_trajectory(lease.lease_id, 1), prompt_token_ids=(3, 4, 5))
    with pytest.raises(InvalidMessageError, match=r"trajectories\[0\]\.prompt_token_ids: must be"):
        submit(book, lease.lease_id, [other])
    assert lease.num_missing == 1


@pytest.mark.parametrize(
    ("prompt_of_partial", "is_fine"), [((3, 4), True), ((4, 3), False), (None, True)]
)
def test_a_response_belongs_to_the_prompt_of_its_lease(book, prompt_of_partial, is_fine):
    partial = replace(
        make_partial_response(0),
        prompt_xxh3=prompt_checksum(prompt_of_partial) if prompt_of_partial else 0,
    )
    lease = lease_of(book, 0, partial_responses=(partial,))
    if is_fine:
        assert submit(book, lease.lease_id, make_trajectories(lease)) == ["accepted"]
    else:
        with pytest.raises(InvalidMessageError, match="the lease's partial responses"):
            submit(book, lease.lease_id, make_trajectories(lease))


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


MISSING = Failure(
    cause=FailureCause.REWARD,
    exception_type="KeyError",
    message="'answer'",
    location="/app/task.py:12",
)


def watch(clock=None, events=None, **policy):
    """The watch of a run whose only worker is `w`."""
    clock, events = clock or ManualClock(), [] if events is None else events
    spec = make_run(failurePolicy={"maxFailuresInARow": 3, **policy}).spec
    registry = WorkerRegistry(clock)
    registry.record_request("w", "main", 0)
    troubles = Troubles(spec, clock, lambda *event: events.append(event))
    return FailureWatch(spec, registry, clock, troubles)


def fail(watched, times, failure=MISSING):
    for _ in range(times):
        watched.record_failure("w", failure, granted_s=0.0)


def test_an_environment_that_never_worked_ends_the_run_with_the_reason_and_the_place():
    watched = watch()
    fail(watched, 2)
    watched.check()
    fail(watched, 1)
    said = (
        r"^3 generations in a row failed, on 'w'; 3 of them: "
        r"environment 'sort_digits': reward: KeyError: 'answer' \(/app/task.py:12\);"
        r".*maxFailuresInARow"
    )
    with pytest.raises(TooManyFailuresError, match=said):
        watched.check()


def test_a_response_between_failures_restarts_the_count():
    watched = watch()
    for _ in range(10):
        fail(watched, 2)
        watched.check()
        watched.record_success()
    assert watched.in_a_row == 0


def test_a_worker_waits_once_it_has_half_of_the_failures_that_end_a_run():
    watched, waits = watch(maxFailuresInARow=4), []
    watched._registry.record_request("other", "main", 0)
    for _ in range(3):
        fail(watched, 1)
        waits.append(watched.must_wait("w"))
    assert waits == [False, True, True]


def test_one_that_worked_may_fail_for_as_long_as_is_tolerated():
    clock = ManualClock()
    watched = watch(clock)
    watched.record_success()
    fail(watched, 1000)
    clock.advance(TOLERANCE_S - 1.0)
    watched.check()
    clock.advance(1.0)
    with pytest.raises(TooManyFailuresError, match="1000 generations in a row"):
        watched.check()


def test_the_most_frequent_causes_are_named_first():
    watched = watch()
    fail(watched, 2, Failure(cause=FailureCause.ENGINE, message="no memory"))
    fail(watched, 5)
    said = r"5 of them: environment 'sort_digits': reward: KeyError.*; 2 of them: engine: no memory"
    with pytest.raises(TooManyFailuresError, match=said):
        watched.check()


async def fail_leases(fixture, times):
    """Report the failure of so many leases, one after the other."""
    for _ in range(times):
        (given,) = await fixture.dispatcher.lease(work_request(room=2), wait_s=0)
        fixture.dispatcher.fail("w", given.lease_id, MISSING)


async def test_a_learner_that_waits_for_a_batch_hears_that_there_will_be_none():
    fixture = dispatcher_fixture(failurePolicy={"maxFailuresInARow": 3})
    waiting = asyncio.create_task(fixture.dispatcher.next_batch())
    await fail_leases(fixture, 3)
    with pytest.raises(TooManyFailuresError, match="KeyError: 'answer'"):
        await waiting


async def test_so_does_one_that_waits_for_its_first_evaluation():
    fixture = dispatcher_fixture(
        failurePolicy={"maxFailuresInARow": 3}, evaluation={"prompts": 5, "everySteps": 100}
    )
    round_ = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=True))
    await asyncio.sleep(0)
    for _ in range(3):
        (given,) = await fixture.dispatcher.lease(work_request(room=1), wait_s=0)
        fixture.dispatcher.fail("w", given.lease_id, MISSING)
    with pytest.raises(TooManyFailuresError):
        await round_


async def test_an_accepted_response_ends_the_row():
    fixture = dispatcher_fixture()
    await fail_leases(fixture, 2)
    (given,) = await fixture.dispatcher.lease(work_request(room=2), wait_s=0)
    assert fixture.dispatcher.failures.in_a_row == 2
    fixture.submit(given)
    assert fixture.dispatcher.failures.in_a_row == 0
