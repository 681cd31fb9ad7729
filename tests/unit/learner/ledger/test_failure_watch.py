"""A run whose environment never works ends soon; one that worked survives a short outage."""

from __future__ import annotations

import asyncio

import pytest

from tests.fixtures.learner.dispatcher import (
    ManualClock,
    dispatcher_fixture,
    make_run,
    work_request,
)
from vcpo.wire.failures import Failure, FailureCause
from vcpo_learner.ledger.failure_watch import FailureWatch, TooManyFailuresError
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.troubles import Troubles

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
        r"environment 'sort_digits': reward: KeyError: 'answer' \(/app/task.py:12\)\."
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


def test_one_that_worked_may_fail_for_as_long_as_is_tolerated():
    clock = ManualClock()
    watched = watch(clock, failureToleranceSeconds=60)
    watched.record_success()
    fail(watched, 1000)
    clock.advance(59.0)
    watched.check()
    clock.advance(1.0)
    with pytest.raises(TooManyFailuresError, match="1000 generations in a row"):
        watched.check()


def test_what_the_engine_cannot_do_is_not_blamed_on_the_environment():
    watched = watch()
    fail(watched, 3, Failure(cause=FailureCause.ENGINE, message="no memory"))
    with pytest.raises(TooManyFailuresError, match="3 of them: engine: no memory"):
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
