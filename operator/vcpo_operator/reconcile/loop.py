"""The reconcile loop: workers that take runs from the queue and reconcile them."""

from __future__ import annotations

import asyncio
import logging
import time

from vcpo.metrics import OperatorMetrics
from vcpo.service.logs import log_fields
from vcpo_operator.names import RunKey
from vcpo_operator.reconcile.reconciler import Reconciler, ReconcileResult
from vcpo_operator.reconcile.workqueue import RunQueue

_LOGGER = logging.getLogger(__name__)
_GAUGES_PERIOD_S = 1.0


class ReconcileLoop:
    """Reconciles the runs of a queue, several at a time, until cancelled."""

    def __init__(
        self, queue: RunQueue, reconciler: Reconciler, metrics: OperatorMetrics, *, workers: int = 8
    ) -> None:
        self._queue = queue
        self._reconciler = reconciler
        self._metrics = metrics
        self._workers = workers
        self.lag_s = 0.0
        """How late the event loop woke up last, in seconds; it served nobody for that time."""

    async def run(self) -> None:
        """Work until cancelled."""
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
