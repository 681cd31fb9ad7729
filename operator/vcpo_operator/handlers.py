"""kopf's side: indices that hold records, and handlers that only enqueue.

Nothing is decided or done in a handler, because kopf neither repeats nor reports what fails in
one. There is no finalizer and no annotation of kopf's on any object: `on.event` and indices need
neither (docs/design/010-reconcile.md).
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kopf

from vcpo.metrics import OperatorMetrics
from vcpo_operator.children.manifest import Kind
from vcpo_operator.names import GROUP, PLURAL, RUN_LABEL, VERSION, RunKey
from vcpo_operator.observed.index_view import (
    INDICES,
    PODS,
    RUNS,
    WATCHED,
    IndexedView,
    index_child,
    index_pod,
    index_run,
    run_key,
)
from vcpo_operator.reconcile.workqueue import RunQueue

_SERVER_WATCH_S = 300
_CLIENT_WATCH_S = 310
_REQUEST_TIMEOUT_S = 30
_LONGEST_WAIT_S = 120.0
_LONGEST_LAG_S = 5.0

Login = Callable[..., kopf.ConnectionInfo | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Numbers that tell whether the operator still works."""

    oldest_wait_s: Callable[[], float]
    """How long the run that is due longest has been so."""
    loop_lag_s: Callable[[], float]
    observed_write_lag_s: Callable[[], float]

    def problem(self) -> str:
        """What is wrong; empty when nothing is."""
        if self.oldest_wait_s() > _LONGEST_WAIT_S:
            return f"a run has been due for {self.oldest_wait_s():.0f} s"
        if self.loop_lag_s() > _LONGEST_LAG_S:
            return f"the event loop is {self.loop_lag_s():.1f} s late"
        if self.observed_write_lag_s() > _LONGEST_WAIT_S:
            lag_s = self.observed_write_lag_s()
            return f"the watch has not shown the operator's own write for {lag_s:.0f} s"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What the handlers are connected to."""

    view: IndexedView
    queue: RunQueue
    metrics: OperatorMetrics
    health: Health
    namespaced: bool
    """Whether single namespaces are watched; then nothing cluster-wide is asked for."""
    login: Login
    _generations: dict[RunKey, int] = field(default_factory=dict)

    async def start(self, *, settings: kopf.OperatorSettings, **kwargs: Any) -> None:
        """Set kopf up; it calls this before it watches anything, with every index by its id."""
        self.view.indices = {name: kwargs[name] for name in INDICES}
        configure(settings, namespaced=self.namespaced)

    async def run_event(self, body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002 - kopf's word
        """Enqueue a run that appeared, changed or went."""
        metadata = body["metadata"]
        key = RunKey(metadata["namespace"], metadata["name"])
        generation = int(metadata.get("generation", 0))
        if self._generations.get(key) != generation:
            self.queue.reset_backoff(key)
        self._generations[key] = generation
        if type == "DELETED":
            self._generations.pop(key, None)
        self._seen(RUNS)
        self.queue.add(key)

    async def child_event(self, body: kopf.Body, resource: kopf.Resource, **_: Any) -> None:
        """Enqueue the run that a child or pod belongs to."""
        key = run_key(body)
        self._seen(resource.plural)
        if key is not None:
            self.queue.add(key)

    async def probe(self, **_: Any) -> str:
        """Answer the liveness probe.

        Raises: kopf.PermanentError when something is stuck; the answer is then an HTTP error.
        """
        problem = self.health.problem()
        if problem:
            raise kopf.PermanentError(problem)
        return "ok"

    def _seen(self, resource: str) -> None:
        self.metrics.watch_event_timestamp_s.labels(resource).set(time.time())


def register(registry: kopf.OperatorRegistry, wiring: Wiring) -> None:
    """Register every handler and index; the only place that knows kopf's decorators."""
    kopf.on.startup(id="start", registry=registry)(wiring.start)
    kopf.on.login(id="login", registry=registry)(wiring.login)
    kopf.on.probe(id="health", registry=registry)(wiring.probe)
    runs = (GROUP, VERSION, PLURAL)
    kopf.index(*runs, id=RUNS, registry=registry)(_index_run)
    kopf.on.event(*runs, id=f"{RUNS}-event", registry=registry)(wiring.run_event)
    kopf.index("", "v1", PODS, id=PODS, registry=registry)(_index_pod)
    kopf.on.event("", "v1", PODS, id=f"{PODS}-event", registry=registry)(wiring.child_event)
    for kind in WATCHED:
        resource = (kind.group, kind.api_version.rpartition("/")[2], kind.plural)
        indexing = functools.partial(_index_child, kind)
        kopf.index(*resource, id=kind.plural, registry=registry)(indexing)
        kopf.on.event(*resource, id=f"{kind.plural}-event", registry=registry)(wiring.child_event)


def configure(settings: kopf.OperatorSettings, *, namespaced: bool) -> None:
    """Set what kopf's defaults leave open."""
    settings.peering.standalone = True  # else a stray peering object in the cluster pauses us
    settings.posting.enabled = False  # events are posted by the reconciler, on transition_events
    settings.posting.level = logging.CRITICAL
    settings.scanning.disabled = namespaced  # listing CRDs and namespaces wants cluster-wide rights
    settings.networking.request_timeout = _REQUEST_TIMEOUT_S
    settings.watching.server_timeout = _SERVER_WATCH_S
    settings.watching.client_timeout = _CLIENT_WATCH_S
    for resource in [PODS, *(kind.plural for kind in WATCHED)]:
        settings.watching.label_selectors[resource] = RUN_LABEL


def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in as the environment says: the pod's service account, else the kubeconfig."""
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


async def _index_run(body: kopf.Body, **_: Any) -> dict[RunKey, Any]:
    return dict(index_run(body))


async def _index_pod(body: kopf.Body, **_: Any) -> dict[RunKey, Any]:
    return index_pod(body)


async def _index_child(kind: Kind, /, body: kopf.Body, **_: Any) -> dict[RunKey, Any]:
    return index_child(kind, body)
