"""kopf's handlers: indices that hold records, and handlers that only enqueue.

No handler decides or changes anything, because kopf neither repeats nor reports what fails in one.
The operator sets no finalizer and no annotation of kopf's: `on.event` and indices need neither
(docs/inside/operator-and-workers.md).
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kopf

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
from vcpo_operator.reconcile.loop import RunQueue

_SERVER_WATCH_S = 300
_CLIENT_WATCH_S = 310
_REQUEST_TIMEOUT_S = 30
_MAX_WAIT_S = 120.0
_MAX_LAG_S = 5.0

Login = Callable[..., kopf.ConnectionInfo | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Numbers that show whether the operator still works, in seconds."""

    oldest_wait_s: Callable[[], float]
    loop_lag_s: Callable[[], float]
    observed_write_lag_s: Callable[[], float]

    def problem(self) -> str:
        """Return what is wrong; empty when nothing is."""
        if self.oldest_wait_s() > _MAX_WAIT_S:
            return f"a run has been due for {self.oldest_wait_s():.0f} s"
        if self.loop_lag_s() > _MAX_LAG_S:
            return f"the event loop is {self.loop_lag_s():.1f} s late"
        if self.observed_write_lag_s() > _MAX_WAIT_S:
            lag_s = self.observed_write_lag_s()
            return f"the watch has not shown the operator's own write for {lag_s:.0f} s"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """The handlers that kopf calls, and what they enqueue into. One owner: kopf's event loop."""

    view: IndexedView
    queue: RunQueue
    health: Health
    namespaced: bool
    """Whether single namespaces are watched; then nothing cluster-wide is requested."""
    login: Login
    _generations: dict[RunKey, int] = field(default_factory=dict)

    async def start(self, *, settings: kopf.OperatorSettings, **kwargs: Any) -> None:
        self.view.indices = {name: kwargs[name] for name in INDICES}
        configure(settings, namespaced=self.namespaced)

    async def run_event(self, body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002 - kopf's word
        """Enqueue a run that was created, changed or deleted; an edit ends its back-off."""
        metadata = body["metadata"]
        key = RunKey(metadata["namespace"], metadata["name"])
        generation = int(metadata.get("generation", 0))
        if self._generations.get(key) != generation:
            self.queue.reset_backoff(key)
        self._generations[key] = generation
        if type == "DELETED":
            self._generations.pop(key, None)
        self.queue.add(key)

    async def child_event(self, body: kopf.Body, **_: Any) -> None:
        key = run_key(body)
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


def register(registry: kopf.OperatorRegistry, handlers: Handlers) -> None:
    """Register every handler and index; only this function uses kopf's decorators."""
    kopf.on.startup(id="start", registry=registry)(handlers.start)
    kopf.on.login(id="login", registry=registry)(handlers.login)
    kopf.on.probe(id="health", registry=registry)(handlers.probe)
    runs = (GROUP, VERSION, PLURAL)
    kopf.index(*runs, id=RUNS, registry=registry)(_indexer(index_run))
    kopf.on.event(*runs, id=f"{RUNS}-event", registry=registry)(handlers.run_event)
    kopf.index("", "v1", PODS, id=PODS, registry=registry)(_indexer(index_pod))
    kopf.on.event("", "v1", PODS, id=f"{PODS}-event", registry=registry)(handlers.child_event)
    for kind in WATCHED:
        resource = (kind.group, kind.api_version.rpartition("/")[2], kind.plural)
        indexer = _indexer(functools.partial(index_child, kind))
        kopf.index(*resource, id=kind.plural, registry=registry)(indexer)
        kopf.on.event(*resource, id=f"{kind.plural}-event", registry=registry)(handlers.child_event)


def configure(settings: kopf.OperatorSettings, *, namespaced: bool) -> None:
    """Set kopf's settings."""
    settings.peering.standalone = True  # else a peering object in the cluster could pause us
    settings.posting.enabled = False  # the reconciler posts events, on changes of the status
    settings.posting.level = logging.CRITICAL
    settings.scanning.disabled = namespaced  # listing CRDs and namespaces needs cluster-wide rights
    settings.networking.request_timeout = _REQUEST_TIMEOUT_S
    settings.watching.server_timeout = _SERVER_WATCH_S
    settings.watching.client_timeout = _CLIENT_WATCH_S
    for resource in [PODS, *(kind.plural for kind in WATCHED)]:
        settings.watching.label_selectors[resource] = RUN_LABEL


def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in with the pod's service account, else with the kubeconfig."""
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def _indexer(index: Callable[[kopf.Body], Any]) -> Callable[..., Any]:
    """Return an indexing function as kopf calls it.

    It is a coroutine, since kopf runs plain functions in a thread each.
    """

    async def indexer(body: kopf.Body, **_: Any) -> Any:
        return index(body)

    return indexer
