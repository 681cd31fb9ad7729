"""The policy store: the newest versions of the weights, immutable and ready to be fetched.

The store keeps the last few versions as full sets, and each version as a delta from the version
before it. A worker with an older version fetches the chain of deltas from there if the chain is
smaller than the full set, else the full set. So no worker applies a long chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.wire.errors import NotFoundError
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import manifest_of
from vcpo_learner.change_notifier import ChangeNotifier
from vcpo_learner.clock import Clock
from vcpo_learner.weights.deltas import encode_delta

_KEPT_VERSIONS = 3
_KEPT_DELTAS = 64
"""Bounds the list of deltas when versions hardly differ; no useful chain is as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDelta:
    """The change from one version to the next."""

    entry: policy_pb2.DeltaEntry
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """One version: its description and its bytes."""

    manifest: policy_pb2.PolicyManifest
    payload: bytes
    """A safetensors file."""
    delta: PublishedDelta | None = None
    """From the version before; None if there is no such version or the delta is not smaller."""


class PolicyStore:
    """Holds the last few versions in memory. Owner: the learner's event loop.

    A version that the store drops cannot be fetched any more; a fetch under way keeps its bytes.
    """

    def __init__(self, *, incarnation: str, clock: Clock) -> None:
        self.incarnation = incarnation
        """Incarnation of the learner that numbers these versions."""
        self._clock = clock
        self._versions: OrderedDict[int, PublishedPolicy] = OrderedDict()
        self._deltas: list[PublishedDelta] = []
        self._changed = ChangeNotifier()

    def prepare(self, policy_version: int, payload: bytes) -> PublishedPolicy:
        """Compute a version's manifest and delta; may run in another thread.

        The caller must publish the version before it prepares the next one.
        """
        manifest = manifest_of(payload, policy_version=policy_version, incarnation=self.incarnation)
        delta = self._delta_to(policy_version, payload)
        return PublishedPolicy(manifest=manifest, payload=payload, delta=delta)

    def publish(self, policy: PublishedPolicy) -> None:
        """Make a prepared version the newest one and wake all waiting calls."""
        self._versions[policy.manifest.policy_version] = policy
        while len(self._versions) > _KEPT_VERSIONS:
            self._versions.popitem(last=False)
        known = [*self._deltas, policy.delta] if policy.delta else []
        self._deltas = useful_deltas(known[-_KEPT_DELTAS:], len(policy.payload))
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
            newest = self._newest()
            held = held_incarnation == self.incarnation and held_version is not None
            is_fresh = newest is not None and not (
                held and newest.manifest.policy_version == held_version
            )
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

    def _newest(self) -> PublishedPolicy | None:
        return next(reversed(self._versions.values()), None)

    def _delta_to(self, policy_version: int, payload: bytes) -> PublishedDelta | None:
        """Return the delta from the newest version to `payload`; None if it is not smaller."""
        base = self._newest()
        data = encode_delta(base.payload, payload) if base else None
        if base is None or data is None:
            return None
        entry = policy_pb2.DeltaEntry(
            base_policy_version=base.manifest.policy_version,
            policy_version=policy_version,
            total_bytes=len(data),
        )
        return PublishedDelta(entry=entry, data=data)


def useful_deltas(deltas: Sequence[PublishedDelta], full_bytes: int) -> list[PublishedDelta]:
    """Return the newest deltas, as many as are together smaller than the full set."""
    sent_bytes = 0
    for number, delta in enumerate(reversed(deltas)):
        sent_bytes += len(delta.data)
        if sent_bytes >= full_bytes:
            return list(deltas[len(deltas) - number :])
    return list(deltas)
