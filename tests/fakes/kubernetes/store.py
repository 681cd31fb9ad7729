"""Objects, their history and one revision counter: the etcd of the fake API server.

An object in the store is never changed in place: `put` keeps what it is given and a change is a
new object. So history and answers share structure, and nothing is copied on reading.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.fakes.kubernetes.errors import JsonObject, expired

ResourceKey = tuple[str, str]
ObjectKey = tuple[str, str]

FIRST_REVISION = 1000
HISTORY_LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change. kind: ADDED, MODIFIED or DELETED. before: None when the object is new."""

    kind: str
    revision: int
    resource: ResourceKey
    body: JsonObject
    before: JsonObject | None


def identity(body: JsonObject) -> ObjectKey:
    """(namespace, name); the namespace of a cluster-wide object is empty."""
    metadata = body["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def owner_uids(body: JsonObject | None) -> set[str]:
    """UIDs of all owners."""
    if body is None:
        return set()
    return {reference["uid"] for reference in body["metadata"].get("ownerReferences") or ()}


class Store:
    """Keeps objects by resource, namespace and name. Owner: the API server's event loop."""

    def __init__(self) -> None:
        self.revision = FIRST_REVISION
        self.oldest_revision = FIRST_REVISION
        self._objects: dict[ResourceKey, dict[ObjectKey, JsonObject]] = defaultdict(dict)
        self._history: dict[ResourceKey, list[Event]] = defaultdict(list)
        self._by_uid: dict[str, tuple[ResourceKey, ObjectKey]] = {}
        self._dependents: dict[str, set[tuple[ResourceKey, ObjectKey]]] = defaultdict(set)
        self._listeners: list[Callable[[Event], None]] = []

    def copy(self) -> Store:
        """The same objects without their history, and without listeners."""
        twin = Store()
        twin.revision = twin.oldest_revision = self.revision
        for resource, body in self.everything():
            twin._objects[resource][identity(body)] = body
            twin._by_uid[body["metadata"]["uid"]] = (resource, identity(body))
            twin._index_owners(resource, None, body)
        return twin

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def get(self, resource: ResourceKey, namespace: str, name: str) -> JsonObject | None:
        return self._objects[resource].get((namespace, name))

    def objects(self, resource: ResourceKey, namespace: str = "") -> list[JsonObject]:
        found = self._objects[resource]
        return [found[key] for key in sorted(found) if not namespace or key[0] == namespace]

    def place(self, uid: str) -> tuple[ResourceKey, ObjectKey] | None:
        return self._by_uid.get(uid)

    def dependents(self, uid: str) -> list[tuple[ResourceKey, JsonObject]]:
        places = sorted(self._dependents.get(uid, ()))
        return [(resource, self._objects[resource][key]) for resource, key in places]

    def everything(self) -> Iterator[tuple[ResourceKey, JsonObject]]:
        """Every object with its resource."""
        for resource, objects in list(self._objects.items()):
            for body in list(objects.values()):
                yield resource, body

    def put(self, resource: ResourceKey, body: JsonObject) -> JsonObject:
        """Keep body under its name with the next version; answers what was kept."""
        before = self._objects[resource].get(identity(body))
        self.revision += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.revision)}
        kept = {**body, "metadata": metadata}
        self._objects[resource][identity(body)] = kept
        self._by_uid[metadata["uid"]] = (resource, identity(body))
        self._index_owners(resource, before, kept)
        self._record("ADDED" if before is None else "MODIFIED", resource, kept, before)
        return kept

    def remove(self, resource: ResourceKey, body: JsonObject) -> JsonObject:
        """Drop the object; its last state carries the version of the removal."""
        before = self._objects[resource].pop(identity(body))
        self.revision += 1
        last = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.revision)}}
        self._by_uid.pop(before["metadata"]["uid"], None)
        self._index_owners(resource, before, None)
        self._record("DELETED", resource, last, before)
        return last

    def since(self, resource: ResourceKey, revision: int) -> list[Event]:
        """Changes of a resource after revision, oldest first.

        Raises:
            ApiError: 410 when the history does not reach back that far.
        """
        if revision < self.oldest_revision:
            raise expired(f"too old resource version: {revision} ({self.oldest_revision})")
        history = self._history[resource]
        return history[bisect_right(history, revision, key=lambda event: event.revision) :]

    def compact(self) -> None:
        self.oldest_revision = self.revision
        self._history.clear()

    def _record(
        self, kind: str, resource: ResourceKey, body: JsonObject, before: JsonObject | None
    ) -> None:
        event = Event(
            kind=kind, revision=self.revision, resource=resource, body=body, before=before
        )
        history = self._history[resource]
        history.append(event)
        if len(history) > HISTORY_LIMIT:
            del history[: HISTORY_LIMIT // 2]
            self.oldest_revision = max(self.oldest_revision, history[0].revision)
        for listener in tuple(self._listeners):
            listener(event)

    def _index_owners(
        self, resource: ResourceKey, before: JsonObject | None, after: JsonObject | None
    ) -> None:
        place = (resource, identity(after or before or {}))
        for uid in owner_uids(before) - owner_uids(after):
            self._dependents[uid].discard(place)
            if not self._dependents[uid]:
                del self._dependents[uid]
        for uid in owner_uids(after):
            self._dependents[uid].add(place)
