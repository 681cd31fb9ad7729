"""The work queue: no key twice at once, none missed, and back-off after a failure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from vcpo_operator.names import RunKey
from vcpo_operator.reconcile.loop import LONGEST_BACKOFF_S, RunQueue

A, B = RunKey("ml", "a"), RunKey("ml", "b")


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(name="clock")
def make_clock() -> Clock:
    return Clock()


@pytest.fixture(name="queue")
def make_queue(clock: Clock) -> RunQueue:
    return RunQueue(clock=clock, jitter=lambda: 0.0)


async def is_idle(queue: RunQueue) -> bool:
    taking = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    idle = not taking.done()
    taking.cancel()
    return idle


async def test_a_key_that_is_added_twice_is_reconciled_once(queue: RunQueue):
    queue.add(A)
    queue.add(A)
    assert await queue.get() == A
    queue.finish(A)
    assert await is_idle(queue)


async def test_the_one_due_first_comes_first(queue: RunQueue, clock: Clock):
    queue.add(A, 5.0)
    queue.add(B, 1.0)
    clock.now_s += 10.0
    assert [await queue.get(), await queue.get()] == [B, A]


async def test_a_run_is_never_reconciled_twice_at_once(queue: RunQueue):
    queue.add(A)
    await queue.get()
    queue.add(A)
    assert await is_idle(queue)


async def test_a_key_added_during_its_reconciliation_is_reconciled_after_it(queue: RunQueue):
    queue.add(A)
    await queue.get()
    queue.add(A)
    queue.finish(A)
    assert await queue.get() == A


async def test_an_event_brings_a_wake_up_forward(queue: RunQueue):
    queue.add(A, 60.0)
    queue.add(A)
    assert await queue.get() == A


async def test_a_wake_up_does_not_put_an_event_off(queue: RunQueue):
    queue.add(A)
    queue.add(A, 60.0)
    assert await queue.get() == A


async def fail(queue: RunQueue, clock: Clock, times: int) -> None:
    for _ in range(times):
        clock.now_s += LONGEST_BACKOFF_S
        queue.add(A)
        await queue.get()
        queue.finish(A, failed=True)


@pytest.mark.parametrize(("times", "wait_s"), [(1, 0.5), (2, 1.0), (4, 4.0), (30, 150.0)])
async def test_failures_double_the_wait_up_to_a_bound(
    queue: RunQueue, clock: Clock, times: int, wait_s: float
):
    await fail(queue, clock, times)
    clock.now_s += wait_s - 0.01
    assert queue.depth() == 0
    clock.now_s += 0.01
    assert queue.depth() == 1


async def test_events_do_not_hurry_a_run_that_backs_off(queue: RunQueue, clock: Clock):
    await fail(queue, clock, 5)
    queue.add(A)
    assert await is_idle(queue)


async def test_a_run_that_was_edited_is_reconciled_at_once(queue: RunQueue, clock: Clock):
    await fail(queue, clock, 5)
    queue.reset_backoff(A)
    queue.add(A)
    assert await queue.get() == A


async def test_success_forgets_the_failures(queue: RunQueue, clock: Clock):
    await fail(queue, clock, 5)
    clock.now_s += LONGEST_BACKOFF_S
    await queue.get()
    queue.finish(A)
    await fail(queue, clock, 1)
    clock.now_s += 0.5
    assert queue.depth() == 1


async def test_the_servers_retry_after_is_obeyed(queue: RunQueue, clock: Clock):
    queue.add(A)
    await queue.get()
    queue.finish(A, failed=True, retry_after_s=20.0)
    clock.now_s += 19.0
    assert queue.depth() == 0


async def test_the_oldest_wait_is_reported(queue: RunQueue, clock: Clock):
    queue.add(A)
    clock.now_s += 7.0
    assert (queue.depth(), queue.oldest_s()) == (1, 7.0)


async def test_a_run_that_fails_for_days_still_has_a_backoff(queue, clock):
    for _ in range(2_000):  # 2.0 ** 1024 is no float
        queue.add(A)
        clock.now_s += LONGEST_BACKOFF_S
        assert await queue.get() == A
        queue.finish(A, failed=True)
    assert queue.oldest_s() == 0.0


async def test_a_namespace_that_is_slow_leaves_workers_to_the_others(clock: Clock):
    queue = RunQueue(clock=clock, most_of_namespace=2)
    slow = [RunKey("slow", name) for name in "abc"]
    for key in slow:
        queue.add(key)
    clock.now_s += 10.0
    queue.add(A)
    assert {await queue.get(), await queue.get()} == set(slow[:2])
    assert await queue.get() == A
    assert await is_idle(queue)
    assert (queue.depth(), queue.oldest_s()) == (1, 0.0)
    queue.finish(slow[0])
    assert await queue.get() == slow[2]
