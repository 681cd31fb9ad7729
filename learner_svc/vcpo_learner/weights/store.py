"""The policy store: the newest versions of the weights, ready to be fetched.

```
full set of n, patched in place ---> n + 1 ---> n + 2          one set in memory
deltas             n -> n + 1, n + 1 -> n + 2                  0.15 of a set at most
```

A version that differs little from the one before it is a delta, with which the full set in memory
is patched too. A worker fetches the deltas from the version that it holds, or the full set if
there are none. Whoever reads the full set while it is patched needs the deltas since then
(`published_set`). A version that differs much has a full set of its own, and starts a new chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcpo.wire.errors import NotFoundError
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import manifest_of
from vcpo_learner.change_notifier import ChangeNotifier
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.clock import Clock
from vcpo_learner.shared_file import SharedFile
from vcpo_learner.weight_server.held_files import HeldFile
from vcpo_learner.weights.deltas import encode_delta
from vcpo_learner.weights.published_set import PublishedSet

_KEPT_SETS = 3
"""Full sets in memory, if no delta leads from one to the next."""
_DELTAS_SHARE = 0.15
"""Bytes of all kept deltas over those of a full set; at RL's learning rates about 10 versions."""
_KEPT_DELTAS = 64
"""Bounds the list of deltas when versions hardly differ; no useful chain is as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDelta:
    """The change from one version to the next."""

    entry: policy_pb2.DeltaEntry
    file: SharedFile
    """A safetensors file, as `vcpo.wire.deltas` describes it; its newest version is the entry's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """One version: its description and its bytes."""

    manifest: policy_pb2.PolicyManifest
    full_set: PublishedSet
    """Later versions may share it."""
    delta: PublishedDelta | None = None
    """From the version before; None if there is no such version or the delta is not smaller."""

    @property
    def policy_version(self) -> int:
        """Number of the version."""
        return self.manifest.policy_version


class PolicyStore:
    """Holds the newest versions in memory. Owner: the learner's event loop.

    A version that the store drops cannot be fetched any more; a fetch under way goes on.
    """

    def __init__(self, *, incarnation: str, clock: Clock) -> None:
        self.incarnation = incarnation
        """Incarnation of the learner that numbers these versions."""
        self._clock = clock
        self._versions: OrderedDict[int, PublishedPolicy] = OrderedDict()
        self._deltas: list[PublishedDelta] = []
        self._changed = ChangeNotifier()

    def prepare(
        self, policy_version: int, weights: SharedFile | Mapping[str, ChangedElements]
    ) -> PublishedPolicy:
        """Compute a version's manifest and delta; may run in another thread.

        The caller must publish the version before it prepares the next one.

        weights: a safetensors file, which the store owns from then on, or what differs in the
            newest version's. That one is patched at once.
        """
        delta = None
        if isinstance(weights, SharedFile):
            full_set = PublishedSet(policy_version, weights)
        else:
            base = self.newest
            assert base is not None, "changes need a version that they change"
            full_set = base.full_set
            delta = _delta(base.policy_version, policy_version, encode_delta(weights))
            full_set.patch(policy_version, weights)
        manifest = manifest_of(
            full_set.buffer, policy_version=policy_version, incarnation=self.incarnation
        )
        return PublishedPolicy(manifest=manifest, full_set=full_set, delta=delta)

    def publish(self, policy: PublishedPolicy) -> None:
        """Make a prepared version the newest one and wake all waiting calls."""
        known = [*self._deltas, policy.delta] if policy.delta else []
        self._deltas = useful_deltas(known[-_KEPT_DELTAS:], policy.full_set.file.size_bytes)
        self._versions[policy.policy_version] = policy
        self._drop_versions()
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

    def deltas_from(self, incarnation: str, policy_version: int) -> list[PublishedDelta]:
        """Return the deltas from a version to the newest one; empty if there is no such chain."""
        bases = [delta.entry.base_policy_version for delta in self._deltas]
        if incarnation != self.incarnation or policy_version not in bases:
            return []
        return self._deltas[bases.index(policy_version) :]

    @property
    def deltas(self) -> list[policy_pb2.DeltaEntry]:
        """All deltas that can be fetched, in order; the last one leads to the newest version."""
        return [delta.entry for delta in self._deltas]

    def get(self, incarnation: str, policy_version: int) -> PublishedPolicy:
        """Return one version.

        Raises:
            NotFoundError: if the store does not hold it.
        """
        policy = self._versions.get(policy_version)
        if policy is None or incarnation != self.incarnation:
            raise NotFoundError(
                f"policy_version: {policy_version} is dropped or unknown; ask for the newest"
            )
        return policy

    def get_delta(
        self, incarnation: str, policy_version: int, base_policy_version: int
    ) -> PublishedDelta:
        """Return the delta from one version to another.

        Raises:
            NotFoundError: if the store does not hold it.
        """
        for delta in self._deltas if incarnation == self.incarnation else ():
            ends = (delta.entry.base_policy_version, delta.entry.policy_version)
            if ends == (base_policy_version, policy_version):
                return delta
        raise NotFoundError(
            f"base_policy_version: no delta from {base_policy_version} to {policy_version} is"
            " stored; fetch the full set"
        )

    def held_files(self, prepared: PublishedPolicy | None = None) -> list[HeldFile]:
        """Return every file that can be fetched.

        prepared: a version that is published next; its files are among them.
        """
        extra = [] if prepared is None else [prepared]
        deltas = [*self._deltas, *(policy.delta for policy in extra if policy.delta)]
        whole = {
            policy.policy_version: policy.full_set.file
            for policy in (*self._versions.values(), *extra)
        }
        return [
            *(self._held_file(version, None, file) for version, file in whole.items()),
            *(
                self._held_file(
                    each.entry.policy_version, each.entry.base_policy_version, each.file
                )
                for each in deltas
            ),
        ]

    def _held_file(
        self, policy_version: int, base_policy_version: int | None, file: SharedFile
    ) -> HeldFile:
        return HeldFile(
            incarnation=self.incarnation,
            policy_version=policy_version,
            base_policy_version=base_policy_version,
            file=file,
        )

    @property
    def newest(self) -> PublishedPolicy | None:
        """The newest version; None before the first."""
        return next(reversed(self._versions.values()), None)

    def _drop_versions(self) -> None:
        """Keep what a reader of the full set can use: whole sets, and those with deltas onward."""
        bases = {delta.entry.base_policy_version for delta in self._deltas}
        whole = [
            version
            for version, policy in self._versions.items()
            if policy.full_set.file.newest_version == version
        ]
        kept = bases.union(whole[-_KEPT_SETS:])
        for version in [version for version in self._versions if version not in kept]:
            del self._versions[version]


def _delta(base_policy_version: int, policy_version: int, data: bytes) -> PublishedDelta:
    entry = policy_pb2.DeltaEntry(
        base_policy_version=base_policy_version,
        policy_version=policy_version,
        total_bytes=len(data),
    )
    file = SharedFile.of(data)
    file.newest_version = policy_version
    return PublishedDelta(entry=entry, file=file)


def useful_deltas(deltas: Sequence[PublishedDelta], full_bytes: int) -> list[PublishedDelta]:
    """Return the newest deltas, as many as have room; the newest alone if it is less than a set."""
    kept_bytes = 0
    for number, delta in enumerate(reversed(deltas)):
        kept_bytes += delta.file.size_bytes
        room_bytes = full_bytes * (_DELTAS_SHARE if number else 1)
        if kept_bytes >= room_bytes:
            return list(deltas[len(deltas) - number :])
    return list(deltas)
