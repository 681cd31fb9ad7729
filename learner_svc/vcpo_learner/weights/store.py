"""The policy store: the newest versions of the weights as files, and their manifest.

```
set of n in memory, patched ---> n + 1 ---> n + 2 ---> ...        compared with, and for checksums
files    n.full   n -> n+1.delta   n+1 -> n+2.delta ... m.full    read only, removed when replaced
```

A version that differs little from the one before it is a file with the delta. When the deltas after
the last full set take a quarter of its room, the version is written as a full set too. A worker
reads the deltas from the version that it holds, or the full set and the deltas after it. A version
that differs much is a full set alone, and starts a new chain.

Files never change. What a new version replaces is removed only before the next one is written, and
in memory a full set before its successor: a worker that joins in between asks again. Who has a file
open reads it to its end, as the file system promises for a folder of this machine. In another store
the full set before stays as well, for whoever reads it in pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcpo.wire.deltas import ChangedElements, elements_of, encode_delta, write_changes
from vcpo.wire.errors import NotFoundError
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import delta_name, full_set_name, manifest_of
from vcpo_learner.change_notifier import ChangeNotifier
from vcpo_learner.clock import Clock
from vcpo_learner.weights.version_folder import VersionFolder

DELTAS_SHARE = 0.25
"""Largest size of the kept deltas over that of a full set; about 16 versions at RL's learning
rates. A joining worker reads up to so much more than a full set."""
_KEPT_DELTAS = 64
"""Bounds the list of deltas when versions hardly differ; no useful chain is as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """One version whose files are written."""

    manifest: policy_pb2.PolicyManifest

    @property
    def policy_version(self) -> int:
        """Number of the version."""
        return self.manifest.policy_version


class PolicyStore:
    """Writes versions into a folder, and keeps the newest one's manifest.

    Owner: the learner's event loop, but for `prepare`, which may run in another thread.
    """

    def __init__(self, folder: VersionFolder, *, incarnation: str, clock: Clock) -> None:
        self.incarnation = incarnation
        """Incarnation of the learner that numbers these versions."""
        self.newest: PublishedPolicy | None = None
        """The newest version; None before the first."""
        self._folder = folder
        self._clock = clock
        self.content = bytearray()
        """The full set of the version that was prepared last. Only this object writes it."""
        self._deltas: Sequence[policy_pb2.DeltaEntry] = ()
        """The deltas that are kept, in order."""
        self._full_sets: deque[int] = deque()
        """Versions whose full set is written, the newest last."""
        self._changed = ChangeNotifier()

    def prepare(
        self, policy_version: int, weights: bytearray | Mapping[str, ChangedElements]
    ) -> PublishedPolicy:
        """Write a version's files and compute its manifest.

        The caller must publish the version before it prepares the next one.

        weights: a safetensors file, which the store owns from then on, or what differs in the
            newest version's. That one is patched at once.

        Raises:
            OSError: naming the field, if the store does not take the files.
        """
        self._remove_replaced()
        if isinstance(weights, bytearray):
            self.content, self._deltas = weights, ()
        else:
            assert self.newest is not None, "changes need a version that they change"
            self._write_delta(self.newest.policy_version, policy_version, encode_delta(weights))
            write_changes(elements_of(self.content), weights)
        manifest = manifest_of(
            self.content, policy_version=policy_version, incarnation=self.incarnation
        )
        if not self._full_sets or self._is_full_set_due():
            if self._folder.is_temporary:  # there is no memory for two
                self._full_sets.clear()
                self._remove_replaced()
            self._folder.write(full_set_name(policy_version), self.content)
            self._full_sets.append(policy_version)
        manifest.deltas.extend(self._deltas)
        manifest.full_set_version = self._full_sets[-1]
        manifest.folder = self._folder.url
        return PublishedPolicy(manifest=manifest)

    def publish(self, policy: PublishedPolicy) -> None:
        """Make a prepared version the newest one and wake all waiting calls."""
        self.newest = policy
        self._changed.notify()

    async def wait_for_newest(
        self, *, held_incarnation: str, held_version: int | None, wait_s: float
    ) -> PublishedPolicy:
        """Return the newest version; wait up to `wait_s` for one that the caller does not hold.

        Raises:
            NotFoundError: if no version was published in that time.
        """
        deadline_s = self._clock() + wait_s
        while True:
            newest = self.newest
            held = held_incarnation == self.incarnation and held_version is not None
            is_fresh = newest is not None and not (held and newest.policy_version == held_version)
            remaining_s = deadline_s - self._clock()
            if is_fresh or remaining_s <= 0:
                break
            await self._changed.wait(remaining_s)
        if newest is None:
            raise NotFoundError("policy: no version has been published yet; ask again")
        return newest

    def _write_delta(self, base_policy_version: int, policy_version: int, delta: bytes) -> None:
        entry = policy_pb2.DeltaEntry(
            base_policy_version=base_policy_version,
            policy_version=policy_version,
            total_bytes=len(delta),
        )
        self._folder.write(delta_name(entry), delta)
        self._deltas = useful_deltas([*self._deltas, entry], len(self.content))

    def _is_full_set_due(self) -> bool:
        """Return whether the kept deltas do not lead from the last full set to the newest version.

        They take a share of its room at most, so this bounds what a joining worker reads.
        """
        return self._full_sets[-1] not in {each.base_policy_version for each in self._deltas}

    def _remove_replaced(self) -> None:
        """Remove the files of which the newest manifest makes no use."""
        while len(self._full_sets) > self._folder.kept_full_sets:
            self._full_sets.popleft()
        used = {full_set_name(version) for version in self._full_sets}
        self._folder.keep(used | {delta_name(each) for each in self._deltas})


def useful_deltas(
    deltas: Sequence[policy_pb2.DeltaEntry], full_bytes: int
) -> list[policy_pb2.DeltaEntry]:
    """Return the newest deltas, as many as have room; the newest alone if it is less than a set."""
    deltas = deltas[-_KEPT_DELTAS:]
    kept_bytes = 0
    for number, delta in enumerate(reversed(deltas)):
        kept_bytes += delta.total_bytes
        room_bytes = full_bytes * (DELTAS_SHARE if number else 1)
        if kept_bytes >= room_bytes:
            return list(deltas[len(deltas) - number :])
    return list(deltas)
