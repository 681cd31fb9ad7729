"""The operator's parts, wired together: kopf watches, the queue orders, the loop works."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import kopf

from vcpo.metrics import OperatorMetrics
from vcpo_operator.children.family import OperatorDefaults
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.cluster_api.lease import LeaderLease
from vcpo_operator.cluster_api.standby import serve_standby_probe
from vcpo_operator.handlers import Health, Login, Wiring, login, register
from vcpo_operator.names import FIELD_MANAGER, learner_address
from vcpo_operator.observed.index_view import IndexedView
from vcpo_operator.reconcile.exports import RunExports
from vcpo_operator.reconcile.loop import ReconcileLoop
from vcpo_operator.reconcile.reconciler import Reconciler
from vcpo_operator.reconcile.workqueue import RunQueue
from vcpo_operator.signals.client import AddressOf, LearnerConnections, SignalSource
from vcpo_operator.signals.prometheus import Prometheus, ScrapedSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to operate."""

    defaults: OperatorDefaults
    namespaces: Sequence[str] = ()
    """Namespaces to watch; empty watches all."""
    liveness_endpoint: str | None = None
    """`http://host:port/path` of the liveness probe; None serves none."""
    prometheus_url: str | None = None
    """Where the learners' signals are read instead of asking the learners; None asks them."""
    workers: int = 8
    """Runs looked at in parallel."""
    identity: str = FIELD_MANAGER
    """Name of this operator among others: the pod's, for one."""


class Operator:
    """One operator. All of its parts live in one event loop."""

    def __init__(
        self,
        options: Options,
        cluster: Cluster,
        metrics: OperatorMetrics,
        *,
        address_of: AddressOf = learner_address,
        login: Login = login,
    ) -> None:
        self._options = options
        self._view = IndexedView()
        self._queue = RunQueue(clock=time.monotonic)
        lines = LearnerConnections(clock=time.monotonic, address_of=address_of)
        self._signals = _source(options, lines)
        reconciler = Reconciler(
            view=self._view,
            executor=Executor(cluster, lines),
            lines=self._signals,
            defaults=options.defaults,
            exports=RunExports(metrics),
            clock=time.time,
        )
        self._loop = ReconcileLoop(
            self._queue, reconciler.reconcile, metrics, workers=options.workers
        )
        metrics.watch_echo_lag_s.set_function(reconciler.observed_write_lag_s)
        health = Health(
            oldest_wait_s=self._queue.oldest_s,
            loop_lag_s=lambda: self._loop.lag_s,
            observed_write_lag_s=reconciler.observed_write_lag_s,
        )
        self._registry = kopf.OperatorRegistry()
        wiring = Wiring(
            view=self._view,
            queue=self._queue,
            metrics=metrics,
            health=health,
            namespaced=bool(options.namespaces),
            login=login,
        )
        register(self._registry, wiring)

    async def run(self, stop: asyncio.Event, lease: LeaderLease | None = None) -> None:
        """Operate until `stop` is set, a signal comes, or the lease is lost.

        Raises: LeaseLostError.
        """
        if lease is not None:
            async with serve_standby_probe(self._options.liveness_endpoint):
                await _unless_stopped(lease.take(), stop)
        if stop.is_set():
            return
        works = [self._loop.run()] if lease is None else [self._loop.run(), lease.keep()]
        try:
            await _until_first(self._watch(stop), works, stop)
        finally:
            await self._signals.close()

    async def _watch(self, stop: asyncio.Event) -> None:
        namespaces = self._options.namespaces
        await kopf.operator(
            registry=self._registry,
            # Without one kopf asks for the user's name, and an image's user has none.
            identity=self._options.identity,  # type: ignore[arg-type]  # a str by another name
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            liveness_endpoint=self._options.liveness_endpoint,
            stop_flag=stop,
        )


def _source(options: Options, lines: LearnerConnections) -> SignalSource:
    if options.prometheus_url is None:
        return lines
    return ScrapedSignals(Prometheus(options.prometheus_url), lines, clock=time.time)


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Run until it is done or `stop` is set."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _until_first(
    watch: Coroutine[Any, Any, None],
    works: Sequence[Coroutine[Any, Any, None]],
    stop: asyncio.Event,
) -> None:
    """Run all until one ends; stop the watch in good order and the others at once.

    The works are started first: kopf cancels, when it ends, every task younger than itself.
    """
    working = [asyncio.create_task(work) for work in works]
    watching = asyncio.create_task(watch)
    await asyncio.wait([watching, *working], return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await asyncio.wait([watching])
    for task in working:
        task.cancel()
    await asyncio.wait(working)
    for task in (watching, *working):
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
