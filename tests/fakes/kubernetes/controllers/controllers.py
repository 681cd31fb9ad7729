"""The controller manager of the fake: a queue of keys, and one reconciler for each kind.

Every change enqueues the object, its owners, and, when it is gone, its dependents and whatever
waits for it. Reconcilers are level-triggered and go through the Api like any client, under the
manager's name `kube-controller-manager`. They run after the request that woke them, in the same
event loop; `settled` waits until there is nothing left to do.
"""

import asyncio
import logging
from collections.abc import Callable

from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.controllers import deployments, garbage, statefulsets
from tests.fakes.kubernetes.errors import ApiError, JsonObject
from tests.fakes.kubernetes.objects.deletion import DEFINITIONS, NAMESPACES
from tests.fakes.kubernetes.store import Event, ObjectKey, ResourceKey, identity, owner_uids

Key = tuple[ResourceKey, ObjectKey]
Reconciler = Callable[[Api, JsonObject], None]

RECONCILERS: dict[ResourceKey, Reconciler] = {
    ("apps", "deployments"): deployments.reconcile_deployment,
    ("apps", "replicasets"): deployments.reconcile_replica_set,
    ("apps", "statefulsets"): statefulsets.reconcile,
    NAMESPACES: garbage.empty_namespace,
    DEFINITIONS: garbage.empty_definition,
}

_log = logging.getLogger(__name__)


class Controllers:
    """Runs reconcilers on what changed. Owner: the API server's event loop."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._dirty: dict[Key, None] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        api.store.subscribe(self._enqueue)

    async def wait_until_settled(self) -> None:
        await self._idle.wait()

    async def run(self) -> None:
        """Deal with changes until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._dirty:
                key = next(iter(self._dirty))
                del self._dirty[key]
                self._process(key)
                await asyncio.sleep(0)
            self._idle.set()

    def _enqueue(self, event: Event) -> None:
        store = self._api.store
        keys: list[Key] = [(event.resource, identity(event.body))]
        keys += self._ancestors(owner_uids(event.body) | owner_uids(event.before))
        if event.kind == "DELETED":
            dependents = store.dependents(event.body["metadata"]["uid"])
            keys += [(resource, identity(body)) for resource, body in dependents]
            group, plural = event.resource
            keys.append((NAMESPACES, ("", event.body["metadata"].get("namespace", ""))))
            keys.append((DEFINITIONS, ("", f"{plural}.{group}")))
        self._dirty |= dict.fromkeys(keys)
        self._idle.clear()
        self._work.set()

    def _ancestors(self, uids: set[str]) -> list[Key]:
        """Owners, and theirs: a Deployment under Recreate waits for its pods' end."""
        store = self._api.store
        owners = [place for uid in sorted(uids) if (place := store.place(uid))]
        above = {uid for key, name in owners for uid in owner_uids(store.get(key, *name))}
        return owners + [place for uid in sorted(above) if (place := store.place(uid))]

    def _process(self, key: Key) -> None:
        resource, (namespace, name) = key
        body = self._api.store.get(resource, namespace, name)
        if body is None:
            return
        try:
            if garbage.collect(self._api, resource, body):
                return
            if resource in RECONCILERS:
                RECONCILERS[resource](self._api, body)
        except ApiError as refused:
            _log.warning("controller of %s %s/%s: %s", resource[1], namespace, name, refused)
