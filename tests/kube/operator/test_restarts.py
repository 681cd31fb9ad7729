"""A restarted operator continues from the recorded state and repeats no action."""

import pytest

from tests.fixtures.operator.operator import PODS, operator_fixture, signals

SIGNALS_MAX_AGE_S = 60


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def train(operator):
    """Bring the run to where it trains."""
    await operator.train()
    assert await condition(operator, "Ready") == ("True", "Training")


async def condition(operator, kind):
    """Status and reason of a condition of the run."""
    return (await operator.condition(kind))[:2]


async def events_of_the_run(operator):
    """Names of the events about the run."""
    return {each["metadata"]["name"] for each in await operator.events()}


async def test_a_fresh_operator_that_has_not_reached_the_learner_yet_changes_no_condition(operator):
    await train(operator)
    before, told = (await operator.run())["status"]["conditions"], await events_of_the_run(operator)
    operator.restart_operator()
    operator.connections.signals = None
    for _ in range(4):
        await operator.reconcile()
        operator.now_s += SIGNALS_MAX_AGE_S / 4
    assert (await operator.run())["status"]["conditions"] == before
    assert await events_of_the_run(operator) == told


FAILING = {"failures_in_a_row": 1000, "generation_failure": "It has no tokenizer."}
UNCHANGED = {"skipped": "low_ess", "skipped_steps": 12}


@pytest.mark.parametrize(
    ("said", "ready"),
    [(FAILING, ("False", "GenerationFailing")), (UNCHANGED, ("True", "NoUpdate"))],
)
async def test_what_the_learner_said_of_its_work_stands_until_a_fresh_operator_hears_it(
    operator, said, ready
):
    await train(operator)
    operator.connections.signals = heard = signals(**said)
    await operator.settle()
    assert await condition(operator, "Ready") == ready
    before, told = (await operator.run())["status"]["conditions"], await events_of_the_run(operator)
    operator.restart_operator()
    for says in (None, None, heard):
        operator.connections.signals = says
        await operator.reconcile()
        assert (await operator.run())["status"]["conditions"] == before
        operator.now_s += 1.0
    assert await events_of_the_run(operator) == told


async def test_a_part_that_is_lost_is_reported_before_a_fresh_operator_hears_the_learner(operator):
    await train(operator)
    operator.connections.signals = signals(**UNCHANGED)
    await operator.settle()
    operator.restart_operator()
    operator.connections.signals = None
    unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    await operator.client.merge_patch(f"{PODS}/demo-learner-0/status", unready)
    await operator.settle()
    assert await condition(operator, "Ready") == ("False", "Degraded")


async def test_a_learner_that_a_fresh_operator_never_reaches_is_reported_in_the_end(operator):
    await train(operator)
    operator.restart_operator()
    operator.connections.signals = None
    await operator.reconcile()
    operator.now_s += SIGNALS_MAX_AGE_S + 1.0
    await operator.settle()
    assert await condition(operator, "SignalsFresh") == ("False", "Missing")
    assert await condition(operator, "Ready") == ("False", "Degraded")


async def test_a_learner_that_never_reported_is_missing_from_the_first_reconciliation_on(operator):
    await operator.create()
    await operator.reconcile()
    assert await condition(operator, "SignalsFresh") == ("False", "Missing")
