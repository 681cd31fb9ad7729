"""The policy store: the newest versions of the weights, immutable and ready to be fetched."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from vcpo.wire.errors import NotFoundError
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import manifest_of
from vcpo_learner.broadcast import Broadcast
from vcpo_learner.leases import Clock

_KEPT_VERSIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """One version: what it is and its bytes."""

    manifest: policy_pb2.PolicyManifest
    payload: bytes
    """A safetensors file."""


class PolicyStore:
    """Holds the last few versions in memory. Owner: the learner's event loop.

    A retired version is gone for fetches not yet begun; one under way keeps its bytes.
    """

    def __init__(self, *, incarnation: str, clock: Clock) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._versions: OrderedDict[int, PublishedPolicy] = OrderedDict()
        self._changed = Broadcast()

    def prepare(self, policy_version: int, payload: bytes) -> PublishedPolicy:
        """Compute a version's manifest; safe to call from another thread."""
        manifest = manifest_of(
            payload, policy_version=policy_version, incarnation=self._incarnation
        )
        return PublishedPolicy(manifest=manifest, payload=payload)

    def publish(self, policy: PublishedPolicy) -> None:
        """Make a prepared version the newest and tell everybody who waits."""
        self._versions[policy.manifest.policy_version] = policy
        while len(self._versions) > _KEPT_VERSIONS:
            self._versions.popitem(last=False)
        self._changed.notify()

    async def newest(
        self, *, held_incarnation: str, held_version: int | None, wait_s: float
    ) -> PublishedPolicy:
        """The newest version; waits up to `wait_s` for one the caller does not hold.

        Raises:
            NotFoundError: when nothing was published in that time.
        """
        deadline_s = self._clock() + wait_s
        while True:
            newest = next(reversed(self._versions.values()), None)
            held = held_incarnation == self._incarnation and held_version is not None
            is_news = newest is not None and not (
                held and newest.manifest.policy_version == held_version
            )
            remaining_s = deadline_s - self._clock()
            if is_news or remaining_s <= 0:
                break
            await self._changed.wait(remaining_s)
        if newest is None:
            raise NotFoundError("policy: no version has been published yet; ask again")
        return newest

    def get(self, incarnation: str, policy_version: int) -> PublishedPolicy:
        """One version.

        Raises:
            NotFoundError: when it was never published here or is retired.
        """
        policy = self._versions.get(policy_version)
        if policy is None or incarnation != self._incarnation:
            raise NotFoundError(
                f"policy_version: {policy_version} is retired or unknown; ask for the newest"
            )
        return policy
