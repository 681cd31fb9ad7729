"""The reconcile loop: workers that take runs from the queue and reconcile them."""

import asyncio
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from vcpo.metrics import OperatorMetrics
from vcpo.service.logs import log_fields
from vcpo_operator.names import RunKey
from vcpo_operator.reconcile.reconciler import Reconciler, ReconcileResult

FIRST_BACKOFF_S: Final = 1.0
LONGEST_BACKOFF_S: Final = 300.0


@dataclass(slots=True, kw_only=True)
class _Entry:
    due_s: float | None = None
    """Time of the next reconcile; None while nobody has asked for it."""
    in_work: bool = False
    failures: int = 0
    not_before_s: float = 0.0


@dataclass(slots=True)
class RunQueue:
    """Runs to reconcile. All methods belong to one event loop."""

    clock: Callable[[], float]
    """Monotonic seconds; `get` waits in the time of the event loop."""
    most_of_namespace: int = sys.maxsize
    """Runs of one namespace that are in work at a time, at most."""
    jitter: Callable[[], float] = random.random
    """A number in [0, 1), which spreads runs that failed together."""
    _entries: dict[RunKey, _Entry] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: RunKey, after_s: float = 0.0) -> None:
        entry = self._entries.setdefault(key, _Entry())
        due_s = max(self.clock() + after_s, entry.not_before_s)
        entry.due_s = due_s if entry.due_s is None else min(entry.due_s, due_s)
        self._changed.set()

    async def get(self) -> RunKey:
        """Wait for the next run that is due, and take it into work."""
        while True:
            self._changed.clear()
            due_s, key = min(self._startable(), default=(None, None))
            if due_s is not None and key is not None and due_s <= self.clock():
                entry = self._entries[key]
                entry.due_s, entry.in_work = None, True
                return key
            try:
                async with asyncio.timeout(None if due_s is None else due_s - self.clock()):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def finish(
        self, key: RunKey, *, failed: bool = False, retry_after_s: float | None = None
    ) -> None:
        """End the work on a run; after a failure the next reconcile waits a back-off."""
        entry = self._entries[key]
        entry.in_work = False
        if not failed:
            entry.failures, entry.not_before_s = 0, 0.0
        else:
            entry.failures += 1
            doublings = min(entry.failures - 1, 16)  # bounded: a float may overflow
            backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**doublings)
            wait_s = max(backoff_s * (0.5 + self.jitter() / 2), retry_after_s or 0.0)
            entry.not_before_s = entry.due_s = self.clock() + wait_s
        if entry.due_s is None:
            del self._entries[key]
        self._changed.set()

    def reset_backoff(self, key: RunKey) -> None:
        """End a run's back-off: the cause of its failure may be gone."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.failures, entry.not_before_s = 0, 0.0

    def oldest_s(self) -> float:
        """Return how long the run that is due longest has been due; 0 when none is.

        Runs that wait for others of their namespace do not count.
        """
        now_s = self.clock()
        return max(0.0, now_s - min((due_s for due_s, _ in self._startable()), default=now_s))

    def _startable(self) -> list[tuple[float, RunKey]]:
        busy = Counter(key.namespace for key, entry in self._entries.items() if entry.in_work)
        return [
            each for each in self._waiting() if busy[each[1].namespace] < self.most_of_namespace
        ]

    def _waiting(self) -> list[tuple[float, RunKey]]:
        """Return the runs that are not in work, each with the time at which it is due."""
        entries = self._entries.items()
        return [
            (entry.due_s, key)
            for key, entry in entries
            if entry.due_s is not None and not entry.in_work
        ]


_LOGGER = logging.getLogger(__name__)
_GAUGES_PERIOD_S = 1.0


@dataclass(slots=True, eq=False)
class ReconcileLoop:
    """Reconciles the runs of a queue, several at a time, until cancelled."""

    _queue: RunQueue
    _reconciler: Reconciler
    _metrics: OperatorMetrics
    _workers: int = 8
    lag_s: float = 0.0
    """How late the event loop woke up last, in seconds; it served nobody for that time."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._workers):
                tasks.create_task(self._work(), name=f"reconcile-{number}")
            tasks.create_task(self._measure(), name="gauges")

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            with log_fields(namespace=key.namespace, run=key.name):
                result = await self._reconcile_once(key)
            if result.requeue_after_s is not None and not result.error:
                self._queue.add(key, result.requeue_after_s)
            failed = bool(result.error)
            self._queue.finish(key, failed=failed, retry_after_s=result.retry_after_s)

    async def _reconcile_once(self, key: RunKey) -> ReconcileResult:
        started_s = time.monotonic()
        try:
            result = await self._reconciler.reconcile(key)
            outcome = "error" if result.error else "ok"
        except Exception:  # outermost: a bug in one run's reconcile may not stop the other runs
            _LOGGER.exception("%s: a bug; the run stays as it is and is reconciled again", key)
            result = ReconcileResult(
                requeue_after_s=None, error="a bug; see the log of the operator"
            )
            outcome = "bug"
        self._metrics.reconciles.labels(outcome).inc()
        self._metrics.reconcile_duration_s.observe(time.monotonic() - started_s)
        return result

    async def _measure(self) -> None:
        """Set the gauges now and then; the thread that exports them may not look by itself."""
        loop = asyncio.get_running_loop()
        while True:
            slept_from_s = loop.time()
            await asyncio.sleep(_GAUGES_PERIOD_S)
            self.lag_s = max(0.0, loop.time() - slept_from_s - _GAUGES_PERIOD_S)
            self._metrics.queue_oldest_s.set(self._queue.oldest_s())
            self._metrics.watch_lag_s.set(self._reconciler.observed_write_lag_s())
