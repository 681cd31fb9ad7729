"""A learner is told to end in good order before its workers are taken away."""

import pytest

from tests.kube.operator_scene import operator_scene, report
from vcpo.wire.phase import RunPhase
from vcpo_operator.signals import SignalsError


@pytest.fixture
async def scene(endpoint):
    """A run whose learner trains."""
    async with operator_scene(endpoint) as started:
        await started.create()
        await started.settle()
        started.lines.says = report()
        await started.settle()
        yield started


async def test_a_suspended_run_is_drained_once_and_comes_to_rest(scene):
    await scene.edit(suspend=True)
    await scene.settle()
    assert scene.lines.drains == ["the run is suspended"]
    assert await scene.replicas() == 0


async def test_a_learner_that_takes_no_order_keeps_no_run_from_its_rest(scene, monkeypatch):
    async def refuse(key, reason):
        raise SignalsError("the learner took no drain: connection refused")

    monkeypatch.setattr(scene.lines, "drain", refuse)
    await scene.edit(suspend=True)
    outcome = await scene.look()
    assert not outcome.trouble
    assert await scene.replicas() == 0


async def test_a_run_out_of_time_is_drained_before_its_workers_go(scene):
    await scene.edit(activeDeadlineSeconds=60)
    scene.now_s += 61.0
    await scene.settle()
    assert len(scene.lines.drains) == 1
    assert "activeDeadlineSeconds" in scene.lines.drains[0]
    assert not any(name.startswith("deployments/") for name in await scene.objects())


async def test_a_complete_run_has_ended_by_itself(scene):
    scene.lines.says = report(RunPhase.COMPLETE)
    await scene.settle()
    assert scene.lines.drains == []
