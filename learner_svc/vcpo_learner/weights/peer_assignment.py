"""Which worker fetches the newest version from which peer, so that the learner sends it rarely.

```
learner ---> a ---> c, d
        +--> b ---> e, f        each worker passes on what it has while it still fetches the rest
```

The first workers that ask for a version fetch it from the learner. A later worker is assigned a
peer that asked before it. So a worker only ever waits for earlier workers, and no cycle of waiting
workers can form.

A worker passes on exactly what it fetches: a peer of a worker that fetches a delta must fetch or
hold the same delta. Any worker with the full set can send it. No fetch depends on its assignment:
if the peer fails, the worker tries a few other peers and then the learner, and a worker that asks
twice for the same version is sent to the learner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile

from vcpo_learner.ledger.worker_registry import WorkerRegistry

_MAX_DIRECT = 2
"""Workers that the learner itself sends a version to."""
_NUM_FALLBACKS = 3
"""Other peers that a worker may try if its peer fails."""
_MAX_CHILDREN = 2
"""Workers that one worker sends a version to, while there are others to choose from."""


@dataclass(slots=True)
class _Route:
    """One form in which the newest version is sent: the full set, or the deltas from one base.

    The dictionaries without values are ordered sets.
    """

    num_direct: int = 0
    """Workers that fetch it from the learner."""
    known: dict[str, None] = field(default_factory=dict)
    """Workers that have or fetch it, in the order in which they asked."""
    children: dict[str, int] = field(default_factory=dict)
    """Children of each of them that serves its peers, in the same order."""
    free: dict[str, None] = field(default_factory=dict)
    """Those that may get another child, in the same order."""
    complete: dict[str, None] = field(default_factory=dict)
    """Those that hold the whole of it, in the order in which they were known to."""
    complete_and_free: dict[str, None] = field(default_factory=dict)

    def add(self, worker_id: str, *, serves: bool) -> None:
        """Add a worker that fetches it; do nothing if it is known."""
        if worker_id in self.known:
            return
        self.known[worker_id] = None
        if serves:
            self.children[worker_id] = 0
            self.free[worker_id] = None

    def set_complete(self, worker_id: str) -> None:
        """Record that a worker holds the whole of it."""
        if worker_id in self.children:
            self.complete[worker_id] = None
            if worker_id in self.free:
                self.complete_and_free[worker_id] = None

    def parent(self, worker_id: str) -> str | None:
        """Return the worker that sends to this one; None for the learner."""
        complete = next(filter(worker_id.__ne__, self.complete_and_free), None)
        if complete is not None or self.num_direct < _MAX_DIRECT:
            return complete
        free = next(filter(worker_id.__ne__, self.free), None)
        if free is not None:
            return free
        others = filter(worker_id.__ne__, self.children)
        return min(others, key=self.children.__getitem__, default=None)

    def add_child(self, parent: str | None) -> None:
        """Count a worker that fetches from a parent; None is the learner."""
        if parent is None:
            self.num_direct += 1
            return
        self.children[parent] += 1
        if self.children[parent] >= _MAX_CHILDREN:
            self.free.pop(parent, None)
            self.complete_and_free.pop(parent, None)

    def fallbacks(self, worker_id: str) -> Iterator[str]:
        """Yield the workers to try if the parent fails, best first.

        Those that hold all of it come first, of them those with few children. Then come those that
        asked before the worker, the latest first, because it has the fewest children.
        """
        asked_later = set(takewhile(worker_id.__ne__, reversed(self.known)))
        earlier = (name for name in reversed(self.children) if name not in asked_later)
        yielded = {worker_id}
        for name in chain(self.complete_and_free, self.complete, earlier):
            if name not in yielded:
                yielded.add(name)
                yield name

    def forget(self, worker_id: str) -> None:
        """Remove a worker."""
        for workers in (self.known, self.children, self.free):
            workers.pop(worker_id, None)
        for workers in (self.complete, self.complete_and_free):
            workers.pop(worker_id, None)


class PeerAssignment:
    """Assigns peers for the newest version. Owner: the learner's event loop.

    It knows the workers of the registry only, so its memory is bounded as the registry's is. Every
    worker asks at every version: an answer takes the same time among ten workers and ten thousand.
    """

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._num_removed = registry.num_removed
        self._policy_version: int | None = None
        self._routes: dict[int | None, _Route] = {}
        """By the version that the deltas start from; None is the full set."""
        self._assigned: set[str] = set()
        """Workers that were assigned a peer or the learner for the newest version."""

    def register(self, worker_id: str, address: str, held_version: int | None) -> None:
        """Record where a worker serves weights, and which version of this learner it holds."""
        self._registry.record_address(worker_id, address)
        self._forget_unregistered()
        if held_version is not None and held_version == self._policy_version:
            full_set = self._route(None)
            full_set.add(worker_id, serves=bool(address))
            full_set.set_complete(worker_id)

    def is_assigned(self, worker_id: str, policy_version: int) -> bool:
        """Return whether the worker has asked for this version before."""
        return policy_version == self._policy_version and worker_id in self._assigned

    def assign(self, worker_id: str, *, policy_version: int, base_version: int | None) -> str:
        """Return the address of the peer to fetch the newest version from; empty is the learner.

        base_version: version that the worker's deltas start from; None if it fetches the full set.
        """
        if policy_version != self._policy_version:
            self._policy_version = policy_version
            self._routes = {}
            self._assigned = set()
        if worker_id in self._assigned or worker_id not in self._registry:
            return ""
        route = self._route(base_version)
        parent = route.parent(worker_id)
        route.add_child(parent)
        self._assigned.add(worker_id)
        route.add(worker_id, serves=bool(self._registry.serving_address(worker_id)))
        return self._registry.serving_address(parent) if parent is not None else ""

    def fallbacks(self, worker_id: str, *, base_version: int | None) -> list[str]:
        """Return the addresses of peers to try if the assigned one fails, best first."""
        names = self._route(base_version).fallbacks(worker_id)
        addresses = filter(None, map(self._registry.serving_address, names))
        return list(islice(addresses, _NUM_FALLBACKS))

    def _forget_unregistered(self) -> None:
        """Remove the workers that the registry no longer knows."""
        if self._num_removed == self._registry.num_removed:
            return
        self._num_removed = self._registry.num_removed
        for route in self._routes.values():
            for name in [name for name in route.known if name not in self._registry]:
                route.forget(name)
        self._assigned = {name for name in self._assigned if name in self._registry}

    def _route(self, base_version: int | None) -> _Route:
        return self._routes.setdefault(base_version, _Route())


def serving_address(caller: str, port: int) -> str:
    """Return host:port of a caller that serves on `port`; empty if unknown or if the port is 0.

    caller: gRPC's name of the peer, such as `ipv4:10.0.0.7:41234` or `ipv6:[fd00::7]:41234`; the
        brackets may be escaped.
    """
    kind, _, address = caller.partition(":")
    host = address.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]")
    return f"{host}:{port}" if kind in {"ipv4", "ipv6"} and host and port else ""
