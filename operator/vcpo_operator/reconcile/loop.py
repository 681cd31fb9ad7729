"""The loop: workers that take runs from the queue and look at them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from vcpo.metrics import OperatorMetrics
from vcpo_operator.names import RunKey
from vcpo_operator.reconcile.reconciler import ReconcileResult
from vcpo_operator.reconcile.workqueue import RunQueue

_LOGGER = logging.getLogger(__name__)
_GAUGES_PERIOD_S = 1.0

Reconcile = Callable[[RunKey], Awaitable[ReconcileResult]]


class ReconcileLoop:
    """Runs `reconcile` for every key of a queue, several at a time, until cancelled."""

    def __init__(
        self, queue: RunQueue, reconcile: Reconcile, metrics: OperatorMetrics, *, workers: int = 8
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._metrics = metrics
        self._workers = workers
        self.lag_s = 0.0
        """How late the event loop woke up last; it serves nobody for so long."""

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._workers):
                tasks.create_task(self._work(), name=f"reconcile-{number}")
            tasks.create_task(self._watch_itself(), name="loop-lag")

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            outcome = await self._look(key)
            if outcome.requeue_after_s is not None and not outcome.error:
                self._queue.add(key, outcome.requeue_after_s)
            failed = bool(outcome.error)
            self._queue.done(key, failed=failed, retry_after_s=outcome.retry_after_s)

    async def _look(self, key: RunKey) -> ReconcileResult:
        started_s = time.monotonic()
        try:
            outcome = await self._reconcile(key)
            result = "error" if outcome.error else "ok"
        except Exception:  # outermost: a bug that one run brings out may not stop the others
            _LOGGER.exception("%s: a bug; the run is left as it is and looked at again", key)
            outcome = ReconcileResult(requeue_after_s=None, error="a bug; see the operator's log")
            result = "bug"
        self._metrics.reconciles.labels(result).inc()
        self._metrics.reconcile_duration_s.observe(time.monotonic() - started_s)
        return outcome

    async def _watch_itself(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked_s = loop.time()
            await asyncio.sleep(_GAUGES_PERIOD_S)
            self.lag_s = max(0.0, loop.time() - asked_s - _GAUGES_PERIOD_S)
            self._metrics.loop_lag_s.set(self.lag_s)
            self._metrics.queue_depth.set(self._queue.depth())
            self._metrics.queue_oldest_s.set(self._queue.oldest_s())
