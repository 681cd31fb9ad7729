"""The effect of a lowered admission lag on a run whose workers always keep up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.fixtures.learner.dispatcher import (
    DispatcherFixture,
    dispatcher_fixture,
    make_partial_response,
    work_request,
)

BATCH = 4
"""Trajectories of a step: two prompts of two."""


@dataclass
class SaturatedRun(DispatcherFixture):
    """Workers complete every lease at once; the learner then takes a step."""

    lags: list[int] = field(default_factory=list)
    """Age of the oldest token of each batch, in policy versions."""

    async def complete_all(self) -> None:
        dispatcher = self.dispatcher
        version = dispatcher.policy_version
        for assignment in await dispatcher.lease(work_request(held=version), wait_s=0):
            self.submit(assignment, versions=(version,))

    async def step(self) -> None:
        await self.complete_all()
        dispatcher = self.dispatcher
        batch = await dispatcher.next_batch()
        oldest = min(group.oldest_step for group in batch)
        self.lags.append(dispatcher.policy_version - oldest)
        dispatcher.advance_version()

    def dropped(self) -> dict[str, int]:
        self.ledger.counts().check()
        return dict(self.ledger.counts().dropped)


@pytest.fixture
async def run():
    """A run in its steady state: each batch is as old as the spec allows."""
    parts = dispatcher_fixture(steps=1000, algorithm={"maxPolicyLagSteps": 8})
    run = SaturatedRun(**vars(parts))
    for _ in range(12):
        await run.step()
    assert run.lags[8:] == [8] * 4
    assert run.dropped() == {}
    return run


async def test_no_step_after_a_tightening_trains_on_what_the_limit_would_not_admit(run):
    for limit in (4, 2, 1, 0):
        run.dispatcher.throttle(limit)
        run.lags.clear()
        for _ in range(11):
            await run.step()
        assert run.lags == [limit] * 11


@pytest.mark.parametrize(("limit", "num_batches"), [(7, 1), (4, 4), (2, 6), (0, 8)])
async def test_a_tightening_costs_a_batch_for_each_version_that_it_takes_away(
    run, limit, num_batches
):
    # Nine batches wait, sampled 8 to 0 versions ago, and take their turns one version apart.
    await run.complete_all()
    run.dispatcher.throttle(limit)
    for _ in range(30):
        await run.step()
    assert run.dropped() == {"throttled": num_batches * BATCH}


async def test_partial_responses_of_the_wider_limit_are_not_resumed(run):
    dispatcher = run.dispatcher
    dispatcher.throttle(2)
    await run.step()
    (lease, *_) = await dispatcher.lease(work_request(held=13), wait_s=0)
    dispatcher.release("w", [lease.lease_id], [make_partial_response(9, 13)])
    (again, *_) = await dispatcher.lease(work_request(held=13), wait_s=0)
    assert again.partial_responses == ()
