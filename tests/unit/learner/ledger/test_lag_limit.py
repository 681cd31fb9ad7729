"""How far back work may reach: the lag limit, what it drops, and leases beyond need."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import (
    DispatcherFixture,
    dispatcher_fixture,
    make_partial_response,
    make_trajectories,
    work_request,
)
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import Rollbacks
from vcpo_learner.ledger.lag_limit import LagLimit, limit_from_message, limit_to_message

BOUND = 6
CRITICAL, WARN, OK = WarningLevel.CRITICAL, WarningLevel.WARN, WarningLevel.OK
OFF = {"enabled": False}
NONE = Rollbacks()


def make_dispatcher(**health):
    return dispatcher_fixture(algorithm={"maxPolicyLagSteps": BOUND}, health=health).dispatcher


def observe(dispatcher, level):
    dispatcher.observe_health(level, dispatcher.lag_limit.rollbacks)


def test_the_limit_stays_after_the_warning_until_the_host_sets_another():
    dispatcher = make_dispatcher()
    observe(dispatcher, CRITICAL)
    observe(dispatcher, OK)
    assert dispatcher.lag_limit_steps == 0
    assert dispatcher.throttle(3) == dispatcher.lag_limit_steps == 3


def test_a_host_that_has_not_heard_of_the_warning_does_not_raise_the_limit():
    dispatcher = make_dispatcher()
    observe(dispatcher, CRITICAL)
    assert dispatcher.throttle(5) == dispatcher.lag_limit_steps == 0


@pytest.mark.parametrize(("health", "limits"), [({}, [6, 6, 0]), (OFF, [6, 6, 6])])
def test_a_learner_reacts_to_a_critical_warning_unless_the_spec_forbids_it(health, limits):
    dispatcher, seen = make_dispatcher(**health), []
    for level in (OK, WARN, CRITICAL):
        observe(dispatcher, level)
        seen.append(dispatcher.lag_limit_steps)
    assert seen == limits


def test_a_limit_that_was_left_above_the_bound_of_a_changed_spec_is_the_bound():
    dispatcher = make_dispatcher()
    dispatcher.ledger.record_lag_limit(LagLimit(steps=BOUND + 3))
    assert dispatcher.lag_limit_steps == BOUND


def test_after_a_rollback_no_limit_reaches_back_before_it():
    limit = LagLimit(steps=BOUND, rollbacks=NONE.after(40))
    seen = [limit.in_force(version) for version in range(40, 49)]
    assert seen == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_a_rollback_ends_the_warning_that_it_answers():
    dispatcher = make_dispatcher()
    observe(dispatcher, CRITICAL)
    dispatcher.observe_health(OK, NONE.after(40))
    assert dispatcher.throttle(5) == 0
    assert dispatcher.lag_limit.in_force(45) == 5


def test_a_rollback_leaves_what_the_host_had_set():
    limit = LagLimit(steps=3).after_step(OK, NONE.after(20), make_dispatcher()._spec.health.guards)
    assert [limit.in_force(version) for version in (21, 26)] == [1, 3]


@given(
    st.builds(
        LagLimit,
        steps=st.integers(0, 100),
        level=st.sampled_from(WarningLevel),
        rollbacks=st.builds(
            Rollbacks, number=st.integers(0, 5), version=st.none() | st.integers(0, 100)
        ),
    )
)
def test_a_limit_comes_back_from_its_message(limit):
    assert limit_from_message(limit_to_message(limit)) == limit


@settings(deadline=None)
@given(st.lists(st.sampled_from(WarningLevel) | st.integers(0, 20), max_size=40))
def test_the_limit_is_never_above_what_the_host_set_last_nor_above_the_bound(happenings):
    dispatcher, host = make_dispatcher(), BOUND
    for each in happenings:
        before = dispatcher.lag_limit_steps
        if isinstance(each, WarningLevel):
            observe(dispatcher, each)
            assert dispatcher.lag_limit_steps <= before, "a warning raised the limit"
        else:
            host = each
            dispatcher.throttle(each)
        assert 0 <= dispatcher.lag_limit_steps <= min(host, BOUND)


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
    lease.held_version = 9  # as if it had asked then
    dispatcher.release("w", [lease.lease_id], [make_partial_response(9, 13)])
    (again, *_) = await dispatcher.lease(work_request(held=13), wait_s=0)
    assert again.partial_responses == ()


# 2 prompts of 2 trajectories a step, lag limit 1: 8 trajectories can be used before the first step.
SECTIONS = {
    "steps": 100,
    "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 2, "overProvisionRatio": 2.0},
}


async def take_leases(fixture, **request):
    return await fixture.dispatcher.lease(work_request(**request), wait_s=0)


def submit(fixture, leases):
    for lease in leases:
        fixture.dispatcher.submit("w", lease.lease_id, make_trajectories(lease))


async def test_more_is_granted_than_can_be_used_in_time():
    assert len(await take_leases(dispatcher_fixture())) == 4
    assert len(await take_leases(dispatcher_fixture(**SECTIONS))) == 6


async def test_a_lease_that_cannot_be_used_in_time_is_preempted_and_none_before():
    fixture = dispatcher_fixture(**SECTIONS)
    leases = await take_leases(fixture)
    submit(fixture, leases[:2])
    # 4 accepted of the 8 that can be used: 4 and 4 more may be in flight, and 8 are.
    assert fixture.ledger.preempted_leases("w") == []
    submit(fixture, leases[2:3])
    assert await fixture.dispatcher.next_batch()
    # 6 accepted: 2 and 2 more may be in flight, and 6 are.
    assert fixture.ledger.preempted_leases("w") == [leases[5].lease_id]
    assert await take_leases(fixture) == []


async def test_an_interrupted_response_is_resumed_after_the_step():
    fixture = dispatcher_fixture(**SECTIONS)
    leases = await take_leases(fixture)
    submit(fixture, leases[:3])
    await fixture.dispatcher.next_batch()
    partial = make_partial_response(0, 0)
    fixture.dispatcher.release("w", [leases[5].lease_id], [partial])
    assert fixture.ledger.counts().dropped == {"surplus": 2}
    fixture.dispatcher.policy_version = 1
    resumed, *fresh = await take_leases(fixture, held=1)
    assert (resumed.prompt_index, resumed.partial_responses) == (5, (partial,))
    assert all(lease.partial_responses == () for lease in fresh)
    # 6 accepted of 12: 6 and 4 more may be in flight, and 4 were.
    assert len(fresh) == 2


async def test_a_complete_group_whose_turn_comes_too_late_takes_no_place_of_others():
    fixture = dispatcher_fixture(**SECTIONS)
    # Six groups of version 0 at lag limit 1: the steps at versions 0 and 1 take four of them.
    submit(fixture, await take_leases(fixture))
    assert await take_leases(fixture) == []
    assert fixture.ledger.counts().dropped == {"lag_exceeded": 4}
    assert await fixture.dispatcher.next_batch()
    fixture.dispatcher.policy_version = 1
    # 8 accepted of 12: 4 and 4 more may be in flight, at once.
    assert len(await take_leases(fixture, held=1)) == 4
