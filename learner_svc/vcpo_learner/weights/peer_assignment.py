"""Who fetches a version from whom, so that the learner sends it a few times and not to everybody.

```
learner ---> a ---> c, d
        +--> b ---> e, f        each passes on what it has while the rest is still arriving
```

The first workers to ask for a version get it from the learner, the others from one that asked
before them: whoever asked earlier never waits for whoever asked later, so nobody waits in a circle.
A worker passes on what it fetches, so a delta comes from one that fetches the same delta; the full
set comes from anybody. Nothing depends on this: a worker whose source fails goes to a few others
and then to the learner, and one that asks twice for a version is sent to the learner at once.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from vcpo_learner.ledger.leases import Clock
from vcpo_learner.ledger.worker_registry import WORKER_LOST_AFTER_S

_MAX_WORKERS = 16_384
_FROM_LEARNER = 2
"""Workers that the learner itself sends a version to."""
_NUM_OTHERS = 3
"""Workers to turn to when the one assigned fails."""
_FROM_WORKER = 2
"""Workers that one worker sends a version to, while there are others to choose."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    address: str
    """host:port where it serves; empty when it does not."""
    seen_s: float


@dataclass(slots=True)
class _Way:
    """One way in which the newest version travels: whole, or as the deltas from one base."""

    num_direct: int = 0
    """Workers sent to the learner for it."""
    children: dict[str, int] = field(default_factory=dict)
    """How many each worker that has it or fetches it was given, in the order of asking."""
    complete: set[str] = field(default_factory=set)
    """Workers that hold it already."""


class PeerAssignment:
    """Assigns sources for the newest version. Owner: the learner's event loop.

    max_workers: The most it assigns sources to; any further one is sent to the learner.
    """

    def __init__(self, clock: Clock, *, max_workers: int = _MAX_WORKERS) -> None:
        self._clock = clock
        self._max_workers = max_workers
        self._workers: OrderedDict[str, _Worker] = OrderedDict()
        """Least recently heard of first."""
        self._policy_version: int | None = None
        self._ways: dict[int | None, _Way] = {}
        self._asked: set[str] = set()

    def register(self, worker_id: str, address: str, held_version: int | None) -> None:
        """Note where a worker serves, and the version of this learner that it holds."""
        while self._workers and not self._lives(next(iter(self._workers.values()))):
            self._forget(next(iter(self._workers)))
        if worker_id not in self._workers and len(self._workers) >= self._max_workers:
            return
        self._workers[worker_id] = _Worker(address=address, seen_s=self._clock())
        self._workers.move_to_end(worker_id)
        if held_version is not None and held_version == self._policy_version:
            whole = self._way(None)
            whole.children.setdefault(worker_id, 0)
            whole.complete.add(worker_id)

    def is_assigned(self, worker_id: str, policy_version: int) -> bool:
        """Whether a worker was given a source for this version before."""
        return policy_version == self._policy_version and worker_id in self._asked

    def assign(self, worker_id: str, *, policy_version: int, base_version: int | None) -> str:
        """Where a worker should fetch the newest version; empty for the learner itself.

        base_version: what its deltas start from; None when it fetches the full set.
        """
        if policy_version != self._policy_version:
            self._policy_version = policy_version
            self._ways = {}
            self._asked = set()
        if worker_id in self._asked or worker_id not in self._workers:
            return ""
        way = self._way(base_version)
        parent = self._parent(way, worker_id)
        if parent is None:
            way.num_direct += 1
        else:
            way.children[parent] += 1
        self._asked.add(worker_id)
        way.children.setdefault(worker_id, 0)
        return self._workers[parent].address if parent is not None else ""

    def fallbacks(self, worker_id: str, *, base_version: int | None) -> list[str]:
        """Where to go when the source fails, best first: a few that hold it, or asked earlier."""
        way = self._way(base_version)
        earlier = set(itertools.takewhile(worker_id.__ne__, way.children))
        able = [name for name in earlier | way.complete - {worker_id} if self._serves(name)]
        able.sort(key=lambda name: (name not in way.complete, way.children[name], name))
        return [self._workers[name].address for name in able[:_NUM_OTHERS]]

    def _parent(self, way: _Way, worker_id: str) -> str | None:
        """The worker to send to; None for the learner."""
        able = [name for name in way.children if name != worker_id and self._serves(name)]
        free = [name for name in able if way.children[name] < _FROM_WORKER]
        complete = next((name for name in free if name in way.complete), None)
        if complete is not None or way.num_direct < _FROM_LEARNER:
            return complete
        return next(iter(free), min(able, key=way.children.__getitem__, default=None))

    def _forget(self, worker_id: str) -> None:
        del self._workers[worker_id]
        self._asked.discard(worker_id)
        for way in self._ways.values():
            way.children.pop(worker_id, None)
            way.complete.discard(worker_id)

    def _way(self, base_version: int | None) -> _Way:
        return self._ways.setdefault(base_version, _Way())

    def _serves(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and bool(worker.address) and self._lives(worker)

    def _lives(self, worker: _Worker) -> bool:
        return worker.seen_s >= self._clock() - WORKER_LOST_AFTER_S


def serving_address(caller: str, port: int) -> str:
    """host:port of a caller that serves on `port`; empty when it cannot be told or port is 0.

    caller: as gRPC names it, e.g. `ipv4:10.0.0.7:41234` or `ipv6:[fd00::7]:41234`, whose brackets
        may be escaped.
    """
    kind, _, address = caller.partition(":")
    host = address.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]")
    return f"{host}:{port}" if kind in {"ipv4", "ipv6"} and host and port else ""
