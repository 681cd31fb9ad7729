"""The operator's parts, connected: kopf watches, the queue orders, the loop reconciles."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import kopf

from vcpo.metrics import OperatorMetrics
from vcpo.metrics.hosted_runs import HostedRuns
from vcpo_operator.children.network import OperatorDefaults
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.handlers import Handlers, Health, Login, login, register
from vcpo_operator.names import FIELD_MANAGER, learner_address
from vcpo_operator.observed.index_view import IndexedView
from vcpo_operator.reconcile.loop import ReconcileLoop, RunQueue
from vcpo_operator.reconcile.reconciler import Reconciler
from vcpo_operator.signals.client import AddressOf, LearnerConnections, SignalSource
from vcpo_operator.signals.prometheus import ScrapedSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one operator."""

    defaults: OperatorDefaults
    namespaces: Sequence[str] = ()
    """Namespaces to watch; empty watches all."""
    liveness_endpoint: str | None = None
    """`http://host:port/path` of the liveness probe; None serves none."""
    prometheus_url: str | None = None
    """Prometheus from which the learners' reports come; None calls the learners."""
    workers: int = 8


class Operator:
    """One operator. All its parts live in one event loop."""

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
        view = IndexedView()
        queue = RunQueue(clock=time.monotonic, most_of_namespace=max(1, options.workers * 3 // 4))
        connections = LearnerConnections(clock=time.monotonic, address_of=address_of)
        self._signals: SignalSource = connections
        if options.prometheus_url is not None:
            self._signals = ScrapedSignals(
                url=options.prometheus_url, connections=connections, clock=time.time
            )
        reconciler = Reconciler(
            view=view,
            executor=Executor(cluster, connections),
            signals=self._signals,
            defaults=options.defaults,
            exports=HostedRuns(metrics),
            clock=time.time,
        )
        self._loop = ReconcileLoop(queue, reconciler, metrics, options.workers)
        health = Health(
            oldest_wait_s=queue.oldest_s,
            loop_lag_s=lambda: self._loop.lag_s,
            observed_write_lag_s=reconciler.observed_write_lag_s,
        )
        self._registry = kopf.OperatorRegistry()
        handlers = Handlers(
            view=view, queue=queue, health=health, namespaced=bool(options.namespaces), login=login
        )
        register(self._registry, handlers)

    async def run(self, stop: asyncio.Event) -> None:
        """Operate until `stop` is set or a signal arrives."""
        namespaces = self._options.namespaces
        watch = kopf.operator(
            registry=self._registry,
            # Without an identity kopf asks for the name of the user, and an image's user has none.
            identity=FIELD_MANAGER,  # type: ignore[arg-type]  # a NewType of str
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            liveness_endpoint=self._options.liveness_endpoint,
            stop_flag=stop,
        )
        try:
            await _run_until_one_ends(watch, self._loop.run(), stop)
        finally:
            await self._signals.close()


async def _run_until_one_ends(
    watch: Coroutine[Any, Any, None], loop: Coroutine[Any, Any, None], stop: asyncio.Event
) -> None:
    """Run both until one ends; then stop the watch by its flag, and cancel the loop.

    The loop starts first: when kopf ends, it cancels every task younger than itself.
    """
    reconciling, watching = asyncio.create_task(loop), asyncio.create_task(watch)
    await asyncio.wait([watching, reconciling], return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await asyncio.wait([watching])
    reconciling.cancel()
    await asyncio.wait([reconciling])
    for task in (watching, reconciling):
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
