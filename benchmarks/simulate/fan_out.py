"""How a version reaches the workers: from the learner's server, or from an object store."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from simpy import Environment, Event

from benchmarks.simulate.system import System
from benchmarks.simulate.worker import Worker

_PIECES: Final = 64
"""Parts in which the learner sends a version, so that workers take turns."""

Events = Generator[Event, Any, None]
"""What a process waits for, one after the other."""


class FanOut:
    """The transfers of the newest version."""

    def __init__(self, environment: Environment, system: System) -> None:
        self.sent_bytes = 0
        """By the learner, since the start: to workers, or into the store."""
        self._environment = environment
        self._versions = system.versions
        self._sender_free_s = 0.0
        """When the learner has sent all pieces so far."""
        self._written_version = 0
        """The newest version in the store."""

    def fetch(self, worker: Worker, policy_version: int) -> Events:
        """Bring the newest version to a worker that holds another one."""
        versions = self._versions
        number = policy_version - worker.held_version
        chain_bytes = number * versions.delta_bytes
        room_bytes = versions.full_bytes * (versions.chain_share if number > 1 else 1)
        size_bytes = chain_bytes if chain_bytes < room_bytes else versions.full_bytes
        earliest_s = self._environment.now + size_bytes / versions.link_bytes_per_s
        if versions.are_stored:
            self._write(policy_version)
        else:
            self.sent_bytes += size_bytes
            yield from self._send(size_bytes)
        yield self._environment.timeout(max(0.0, earliest_s - self._environment.now))

    def _write(self, policy_version: int) -> None:
        """Count what the learner has written for the versions up to this one.

        A full set follows when the deltas since the last one take as much of its room as they may.
        """
        versions = self._versions
        num_deltas = max(0, policy_version - self._written_version)
        full_share = min(1.0, versions.delta_bytes / (versions.chain_share * versions.full_bytes))
        each_bytes = versions.delta_bytes + round(full_share * versions.full_bytes)
        self.sent_bytes += num_deltas * each_bytes
        self._written_version += num_deltas

    def _send(self, size_bytes: int) -> Events:
        """Send from the learner's machine, a piece at a time; pieces for others take turns."""
        environment, versions = self._environment, self._versions
        byte_s = max(versions.sent_byte_s, 1.0 / versions.link_bytes_per_s)
        piece_s = size_bytes / _PIECES * byte_s
        if piece_s > 0:
            for _ in range(_PIECES):
                self._sender_free_s = max(self._sender_free_s, environment.now) + piece_s
                yield environment.timeout(self._sender_free_s - environment.now)
