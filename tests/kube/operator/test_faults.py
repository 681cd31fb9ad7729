"""An API server that fails the operator's calls: trouble is told, and gone when the fault is.

On the fake server only: a real one does not fail by script.
"""

import pytest

from tests.fakes.kubernetes.faults import Effect, Fault, broken, overloaded, stale, unavailable
from tests.fixtures.operator.server_scene import RUN, operator_scene

CALLS = [
    ("get", "configmaps"),
    ("get", "secrets"),
    ("patch", "statefulsets"),
    ("patch", "deployments"),
    ("patch", "vcporuns"),
]


@pytest.fixture
async def scene():
    async with operator_scene() as started:
        await started.create()
        yield started


async def undisturbed():
    async with operator_scene() as scene:
        await scene.create()
        await scene.rest()
        return await scene.objects()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(stale(), id="409"),
        pytest.param(overloaded(), id="429"),
        pytest.param(broken(), id="500"),
        pytest.param(unavailable(), id="503"),
    ],
)
@pytest.mark.parametrize(("verb", "resource"), CALLS)
async def test_a_refused_call_is_trouble_and_made_again(scene, error, verb, resource):
    scene.server.faults.add(Fault(error=error, verb=verb, resource=resource))
    outcome = await scene.look()
    assert str(error.code) in outcome.error
    await scene.rest()
    assert await scene.objects() == await undisturbed()


async def test_a_server_that_asks_for_time_gets_it(scene):
    scene.server.faults.add(Fault(error=overloaded(17), verb="patch", resource="services"))
    outcome = await scene.look()
    assert outcome.retry_after_s == 17


async def test_a_child_that_is_refused_is_a_condition_of_the_run(scene):
    fault = Fault(error=broken(), verb="patch", resource="statefulsets", times=None)
    scene.server.faults.add(fault)
    await scene.look()
    conditions = (await scene.client.get(RUN))["status"]["conditions"]
    (ready,) = [each for each in conditions if each["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "ApplyFailed")


async def test_a_lost_event_is_no_trouble(scene):
    scene.server.faults.add(Fault(error=broken(), verb="create", resource="events", times=None))
    await scene.settle()
    await scene.edit(suspend=True)
    assert not (await scene.look()).error


async def test_a_server_that_does_not_answer_is_trouble_in_bounded_time(scene):
    scene.server.faults.add(Fault(effect=Effect.DROP, verb="patch", times=None))
    assert "no answer" in (await scene.look()).error
