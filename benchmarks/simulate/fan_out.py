"""How a version reaches the workers: the product's assignment of peers, over simulated links."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from simpy import Environment, Event

from benchmarks.simulate.system import System
from benchmarks.simulate.worker import Worker
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.weights.peer_assignment import PeerAssignment

_PIECES: Final = 64
"""Parts in which the learner's process sends a version, so that two workers take turns."""
_STREAMS: Final = 2
"""Workers that one host sends a version to at a time; they share its link."""

Events = Generator[Event, Any, None]
"""What a process waits for, one after the other."""


class FanOut:
    """The transfers of the newest version."""

    def __init__(self, environment: Environment, system: System) -> None:
        self.sent_bytes = 0
        """By the learner, since the start."""
        self._environment = environment
        self._system = system
        self._sender_free_s = 0.0
        """When the process that sends has sent all pieces so far."""
        self._peers = PeerAssignment(
            WorkerRegistry(lambda: 0.0, max_workers=system.workers)  # nobody is ever lost
        )
        self._arrivals: dict[str, Event] = {}
        """By worker: the arrival of the version that it asked for last."""

    def fetch(self, worker: Worker, policy_version: int) -> Events:
        """Bring the newest version to a worker that holds another one."""
        environment, versions = self._environment, self._system.versions
        number = policy_version - worker.held_version
        chain_bytes = number * versions.delta_bytes
        room_bytes = versions.full_bytes * (versions.chain_share if number > 1 else 1)
        base = worker.held_version if chain_bytes < room_bytes else None
        size_bytes = versions.full_bytes if base is None else chain_bytes
        self._peers.register(worker.name, worker.name, worker.held_version)
        sender = self._peers.assign(worker.name, policy_version=policy_version, base_version=base)
        arrival = self._arrivals[worker.name] = environment.event()
        at_least_s = size_bytes * _STREAMS / versions.link_bytes_per_s
        earliest_s = environment.now + at_least_s
        if not sender:
            self.sent_bytes += size_bytes
            yield from self._send(size_bytes)
        elif sender in self._arrivals and not self._arrivals[sender].triggered:
            yield self._arrivals[sender]
            yield environment.timeout(versions.hop_s)
        yield environment.timeout(max(0.0, earliest_s - environment.now))
        arrival.succeed()
        self._peers.register(worker.name, worker.name, policy_version)

    def _send(self, size_bytes: int) -> Events:
        """Send from the learner's machine, a piece at a time; pieces for others take turns."""
        environment = self._environment
        piece_s = size_bytes / _PIECES * self._system.versions.sent_byte_s
        if piece_s > 0:
            for _ in range(_PIECES):
                self._sender_free_s = max(self._sender_free_s, environment.now) + piece_s
                yield environment.timeout(self._sender_free_s - environment.now)
