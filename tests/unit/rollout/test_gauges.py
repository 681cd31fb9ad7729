"""Events of a worker as its metrics show them."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from tests.fixtures.rollout.worker import eventually, learner_fixture, run_in_task
from vcpo.metrics import RolloutMetrics
from vcpo.wire.failures import FailureCause
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import (
    EnvironmentFailedError,
    EnvironmentThreads,
    environment_errors,
)


class WorkerMetrics:
    """The metrics of one worker, its gauges, and its environment's threads."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self.metrics = RolloutMetrics(run="run", group="main")
        self.gauges = RolloutGauges(self.metrics)
        self.threads = EnvironmentThreads(2, gauges=self.gauges, timeout_s=timeout_s)

    def value(self, name: str, **labels: str) -> float | None:
        labels = {"run": "run", "group": "main", **labels}
        return self.metrics.registry.get_sample_value(f"vcpo_rollout_{name}", labels)

    def failures(self) -> dict[str, float | None]:
        kinds = ("timeout", "raised")
        return {kind: self.value("environment_failures_total", kind=kind) for kind in kinds}


def fail(error: Exception) -> None:
    with environment_errors(FailureCause.REWARD):
        raise error


async def test_calls_of_the_environment_are_timed_whether_or_not_they_fail():
    worker = WorkerMetrics()
    await worker.threads.call(lambda: 1.0)
    with pytest.raises(EnvironmentFailedError):
        await worker.threads.call(partial(fail, KeyError("answer")))
    assert worker.value("environment_seconds_count") == 2.0
    assert worker.value("environment_seconds_sum") > 0.0


async def test_a_failed_call_is_counted_by_how_it_failed():
    worker = WorkerMetrics(timeout_s=0.05)
    released = threading.Event()
    assert worker.failures() == {"timeout": 0.0, "raised": 0.0}
    with pytest.raises(EnvironmentFailedError):
        await worker.threads.call(partial(fail, KeyError("answer")))
    assert worker.failures() == {"timeout": 0.0, "raised": 1.0}
    with pytest.raises(EnvironmentFailedError):
        await worker.threads.call(released.wait)
    released.set()
    assert worker.failures() == {"timeout": 1.0, "raised": 1.0}


async def test_a_call_that_nobody_waits_for_any_more_is_not_timed():
    worker = WorkerMetrics()
    released, entered = threading.Event(), threading.Event()
    call = asyncio.create_task(worker.threads.call(lambda: entered.set() or released.wait()))
    await asyncio.to_thread(entered.wait)
    call.cancel()
    await asyncio.wait([call])
    released.set()
    assert worker.value("environment_seconds_count") == 0.0


@pytest.mark.parametrize(
    ("events", "age"),
    [
        ([("swap", 3)], 0.0),
        ([("swap", 3), ("hear", 5)], 2.0),
        ([("hear", 5), ("swap", 3)], 2.0),
        ([("hear", 5), ("swap", 3), ("swap", 5)], 0.0),
        ([("swap", 9), ("hear", 4)], 0.0),
        ([("hear", 5)], None),
    ],
    ids=["newest", "behind", "behind at once", "caught up", "a learner that went back", "none"],
)
def test_the_age_of_the_weights_is_how_far_they_are_behind_what_was_heard(events, age):
    worker = WorkerMetrics()
    for kind, version in events:
        if kind == "swap":
            worker.gauges.record_swap(version, 0.1)
        else:
            worker.gauges.hear_of_version(version)
    assert worker.value("weights_age_versions") == age


async def test_weights_that_do_not_arrive_get_older():
    async with learner_fixture() as fixture:
        fixture.publish(0)
        async with run_in_task(fixture.worker()):
            await eventually(lambda: fixture.engine.swapped == [0])
            fixture.engine.swap_weights = lambda weights: asyncio.Event().wait()
            fixture.publish(1)
            await eventually(lambda: fixture.count("vcpo_rollout_weights_age_versions") == 1.0)
