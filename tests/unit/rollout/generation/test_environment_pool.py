"""Environments that block delay only their own responses."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio

from tests.fixtures.rollout.worker import (
    FakeEnvironment,
    environment_threads,
    eventually,
    learner_fixture,
    run_in_task,
)
from vcpo_rollout.generation.environment_pool import (
    THREAD_NAME,
    EnvironmentFailedError,
    HungCallsError,
    num_threads,
)


class Blocking(FakeEnvironment):
    """Makes no prompt before it is released."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()
        self.waiting = 0

    def prompt(self, split, index):
        self.waiting += 1
        self.released.wait()
        return super().prompt(split, index)


@pytest_asyncio.fixture
async def fixture():
    """A learner, and a loop with a single thread for everything that is not an environment's."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    async with learner_fixture() as fixture:
        fixture.environment = Blocking()
        yield fixture
        fixture.environment.released.set()


def threads_of_environments():
    return [one for one in threading.enumerate() if one.name.startswith(THREAD_NAME)]


async def test_weights_arrive_while_every_environment_blocks(fixture):
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=8)):
        await eventually(lambda: fixture.environment.waiting == 4)  # prompts of two responses each
        fixture.publish(1)
        await eventually(lambda: fixture.engine.swapped == [0, 1])
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert fixture.environment.waiting == 4
        fixture.environment.released.set()
        # At version 1, the worker may go on to 12.
        await eventually(lambda: fixture.samples("accepted") >= 8)


async def test_a_worker_that_stops_waits_for_no_environment_and_leaves_no_thread(fixture):
    before = set(threads_of_environments())
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=4, drain_s=0.01)):
        await eventually(lambda: fixture.environment.waiting == 2)
    assert len(set(threads_of_environments()) - before) == 2
    fixture.environment.released.set()
    await eventually(lambda: not set(threads_of_environments()) - before)


@pytest.mark.parametrize(("responses", "threads"), [(1, 1), (64, 64), (256, 256), (10_000, 256)])
def test_there_are_as_many_threads_as_responses_up_to_a_bound(responses, threads):
    assert num_threads(responses) == threads


SHORT_S = 0.02
"""Time of a call of the environment, in tests whose calls hang."""


class Hangs:
    """Hangs in its first calls, until it is released."""

    def __init__(self, times):
        self.left = times
        self.released = threading.Event()

    def __call__(self):
        self.left -= 1
        if self.left >= 0:
            self.released.wait()


async def hang(threads, hangs, times):
    """Make calls that do not return in time, side by side."""
    calls = (threads.call(hangs) for _ in range(times))
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {EnvironmentFailedError}


@pytest.fixture
def hangs():
    hangs = Hangs(1000)
    yield hangs
    hangs.released.set()


async def test_calls_that_hang_take_no_thread_from_the_others(hangs):
    threads = environment_threads(2, timeout_s=SHORT_S)
    await hang(threads, hangs, 2)
    assert await threads.call(lambda: "fine") == "fine"
    threads.check()
    threads.close()


async def test_a_call_that_was_cancelled_counts_once_its_time_is_over(hangs):
    threads = environment_threads(1, timeout_s=SHORT_S)
    calls = [asyncio.create_task(threads.call(hangs)) for _ in range(2)]
    await eventually(lambda: hangs.left == 998)
    for call in calls:
        call.cancel()
    await eventually(lambda: has_ended(threads))
    threads.close()


async def test_too_many_hung_calls_end_the_process_until_they_return(hangs):
    threads = environment_threads(2, timeout_s=SHORT_S)
    await hang(threads, hangs, 3)
    with pytest.raises(HungCallsError, match=r"3 calls have not returned after 0\.02 s"):
        threads.check()
    hangs.released.set()
    await eventually(lambda: not has_ended(threads))
    threads.close()


def has_ended(threads):
    try:
        threads.check()
    except HungCallsError:
        return True
    return False


def hanging_task(hangs):
    """A task whose reward hangs in its first calls."""
    task = FakeEnvironment()
    task.reward_of = lambda: hangs() or 1.0
    return task


async def test_a_worker_goes_on_after_as_many_hung_calls_as_it_has_threads():
    hangs = Hangs(4)
    async with learner_fixture(failurePolicy={"maxFailuresInARow": 1000}) as fixture:
        fixture.environment = hanging_task(hangs)
        fixture.publish(0)
        try:
            async with run_in_task(fixture.worker(places=4, environment_timeout_s=SHORT_S)):
                await eventually(lambda: fixture.samples("accepted") >= 8)
        finally:
            hangs.released.set()
    assert fixture.count("vcpo_rollout_environment_failures_total", kind="timeout") >= 1


async def test_a_worker_that_is_worn_out_ends_with_the_cause():
    hangs = Hangs(6)
    async with learner_fixture(failurePolicy={"maxFailuresInARow": 1000}) as fixture:
        fixture.environment = hanging_task(hangs)
        fixture.publish(0)
        worker = fixture.worker(places=2, drain_s=0.0, environment_timeout_s=SHORT_S)
        try:
            with pytest.raises(HungCallsError, match="calls have not returned"):
                await worker.run()
            assert fixture.count("vcpo_rollout_environment_hung_calls") >= 3
        finally:
            hangs.released.set()
