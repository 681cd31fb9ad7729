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
from vcpo_rollout.generation.environment_pool import THREAD_NAME, num_threads


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


async def test_what_finds_no_thread_free_waits_for_one():
    threads, released = environment_threads(3), threading.Event()
    running = []

    def run():
        running.append(threading.current_thread())
        released.wait()

    calls = [asyncio.create_task(threads.call(run)) for _ in range(5)]
    try:
        await eventually(lambda: len(running) == 3)
    finally:
        released.set()
    await asyncio.gather(*calls)
    threads.close()
    assert len(running) == 5
    assert len(set(running)) == 3


@pytest.mark.parametrize(("responses", "threads"), [(1, 1), (64, 64), (256, 256), (10_000, 256)])
def test_there_are_as_many_threads_as_responses_up_to_a_bound(responses, threads):
    assert num_threads(responses) == threads
