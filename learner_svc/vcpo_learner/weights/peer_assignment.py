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

import itertools
from dataclasses import dataclass, field

from vcpo_learner.ledger.worker_registry import WorkerRegistry

_MAX_DIRECT = 2
"""Workers that the learner itself sends a version to."""
_NUM_FALLBACKS = 3
"""Other peers that a worker may try if its peer fails."""
_MAX_CHILDREN = 2
"""Workers that one worker sends a version to, while there are others to choose from."""


@dataclass(slots=True)
class _Route:
    """One form in which the newest version is sent: the full set, or the deltas from one base."""

    num_direct: int = 0
    """Workers that fetch it from the learner."""
    children: dict[str, int] = field(default_factory=dict)
    """Children of each worker that has or fetches it, in the order in which the workers asked."""
    complete: set[str] = field(default_factory=set)
    """Workers that hold the whole of it."""


class PeerAssignment:
    """Assigns peers for the newest version. Owner: the learner's event loop.

    It knows the workers of the registry only, so its memory is bounded as the registry's is.
    """

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
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
            full_set.children.setdefault(worker_id, 0)
            full_set.complete.add(worker_id)

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
        parent = self._parent(route, worker_id)
        if parent is None:
            route.num_direct += 1
        else:
            route.children[parent] += 1
        self._assigned.add(worker_id)
        route.children.setdefault(worker_id, 0)
        return self._registry.serving_address(parent) if parent is not None else ""

    def fallbacks(self, worker_id: str, *, base_version: int | None) -> list[str]:
        """Return the addresses of peers to try if the assigned one fails, best first.

        Peers that hold the version come first, then peers that asked before the worker did.
        """
        route = self._route(base_version)
        earlier = set(itertools.takewhile(worker_id.__ne__, route.children))
        peers = [name for name in earlier | route.complete - {worker_id} if self._serves(name)]
        peers.sort(key=lambda name: (name not in route.complete, route.children[name], name))
        return [self._registry.serving_address(name) for name in peers[:_NUM_FALLBACKS]]

    def _parent(self, route: _Route, worker_id: str) -> str | None:
        """Return the peer that sends to a worker; None for the learner."""
        peers = [name for name in route.children if name != worker_id and self._serves(name)]
        free = [name for name in peers if route.children[name] < _MAX_CHILDREN]
        complete = next((name for name in free if name in route.complete), None)
        if complete is not None or route.num_direct < _MAX_DIRECT:
            return complete
        return next(iter(free), min(peers, key=route.children.__getitem__, default=None))

    def _forget_unregistered(self) -> None:
        """Remove the workers that the registry no longer knows."""
        for route in self._routes.values():
            for name in [name for name in route.children if name not in self._registry]:
                del route.children[name]
                route.complete.discard(name)
        self._assigned = {name for name in self._assigned if name in self._registry}

    def _route(self, base_version: int | None) -> _Route:
        return self._routes.setdefault(base_version, _Route())

    def _serves(self, worker_id: str) -> bool:
        return bool(self._registry.serving_address(worker_id))


def serving_address(caller: str, port: int) -> str:
    """Return host:port of a caller that serves on `port`; empty if unknown or if the port is 0.

    caller: gRPC's name of the peer, such as `ipv4:10.0.0.7:41234` or `ipv6:[fd00::7]:41234`; the
        brackets may be escaped.
    """
    kind, _, address = caller.partition(":")
    host = address.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]")
    return f"{host}:{port}" if kind in {"ipv4", "ipv6"} and host and port else ""
