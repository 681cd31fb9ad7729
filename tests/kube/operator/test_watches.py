"""The whole operator, kopf included: it sees what changes, also after its watches were cut.

Cut watches and forgotten histories are the fake server's; the rest runs on a real one as well.
"""

import asyncio

import pytest

from tests.fixtures.operator.operator import RUN, operator_fixture, whole_operator

PATIENCE_S = 30.0
POLL_S = 0.05


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


@pytest.fixture
async def fake_operator():
    async with operator_fixture() as started:
        yield started


async def until(condition):
    """Ask until the answer is yes; a real server has no other sign for all that a test may want."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(POLL_S)


async def generation_is_seen(operator, generation):
    """Wait until the run's status speaks of this generation."""

    async def is_seen():
        status = (await operator.run()).get("status") or {}
        return status.get("observedGeneration", 0) == generation

    await until(is_seen)


async def test_a_run_created_before_the_operator_started_is_reconciled(operator):
    await operator.create()
    async with whole_operator(operator):
        await generation_is_seen(operator, 1)


async def test_a_change_after_an_interrupted_watch_is_seen(fake_operator):
    await fake_operator.create()
    async with whole_operator(fake_operator):
        await generation_is_seen(fake_operator, 1)
        fake_operator.server.watches.close_all()
        await fake_operator.edit(suspend=True)
        await generation_is_seen(fake_operator, 2)


async def test_a_change_after_a_forgotten_history_is_seen(fake_operator):
    await fake_operator.create()
    async with whole_operator(fake_operator):
        await generation_is_seen(fake_operator, 1)
        fake_operator.server.watches.close_all()
        await fake_operator.edit(suspend=True)
        fake_operator.server.compact()
        await generation_is_seen(fake_operator, 2)


async def test_a_run_deleted_without_an_operator_leaves_nothing(operator):
    await operator.create()
    await operator.settle()
    await operator.client.delete(RUN)
    await operator.backend.wait_until_settled()
    claim = "persistentvolumeclaims/demo-learner"
    assert list(await operator.objects()) == [claim], "the model's volume alone outlives its run"
