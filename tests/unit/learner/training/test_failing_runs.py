"""The training loop when no response arrives any more."""

import asyncio

import pytest

from tests.fixtures.learner.dispatcher import work_request
from vcpo.records.journal import read_events
from vcpo.wire.failures import Failure, FailureCause
from vcpo.wire.phase import RunPhase
from vcpo_learner.ledger.failure_watch import TooManyFailuresError

BROKEN = Failure(cause=FailureCause.REWARD, exception_type="KeyError", message="'answer'")


async def fail_every_lease(dispatcher):
    """A worker whose environment never works."""
    while dispatcher.phase is RunPhase.RUNNING:
        held = work_request(held=dispatcher.policy_version, room=2)
        for given in await dispatcher.lease(held, wait_s=0):
            dispatcher.fail("w", given.lease_id, BROKEN)
        await asyncio.sleep(0.001)


async def test_a_run_whose_environment_never_works_fails_with_the_reason(make_learner, tmp_path):
    learner = make_learner(failurePolicy={"maxFailuresInARow": 4})
    working = asyncio.create_task(fail_every_lease(learner.dispatcher))
    # How many more fail before the loop looks is up to the scheduler.
    with pytest.raises(TooManyFailuresError, match=r"^\d+ generations in a row .*KeyError"):
        await learner.training.run(drain_s=0)
    working.cancel()
    assert learner.dispatcher.failures.in_a_row >= 4
    events = {event.kind: event.message for event in read_events(tmp_path)}
    assert "KeyError: 'answer'" in events["GenerationFailed"]
    assert "maxFailuresInARow" in events["Failed"]
    assert not (tmp_path / "checkpoints").exists()


async def test_the_steps_taken_before_an_environment_broke_are_saved(make_learner, tmp_path):
    tolerance = {"maxFailuresInARow": 4, "failureToleranceSeconds": 1}
    learner = make_learner(failurePolicy=tolerance, steps=100)
    training = asyncio.create_task(learner.training.run(drain_s=0))
    working = asyncio.create_task(learner._work(None, serves_evaluations=True))
    while learner.dispatcher.policy_version < 2:
        await asyncio.sleep(0.001)
    working.cancel()
    for lease in learner.dispatcher.ledger.leases.all():
        learner.dispatcher.fail("w", lease.lease_id, BROKEN)
    for _ in range(4):
        learner.dispatcher.fail("w", "train-now-0", BROKEN)
    learner.clock.advance(1.0)
    learner.dispatcher.notify()
    with pytest.raises(TooManyFailuresError):
        await training
    step = learner.dispatcher.policy_version
    again = make_learner(failurePolicy=tolerance, steps=100)
    assert again.training.resume() == step >= 2
    # A run that has steps had responses: it is not judged as one that never worked.
    for _ in range(4):
        again.dispatcher.fail("w", "train-now-0", BROKEN)
    again.dispatcher.failures.check()
