"""The supply of weights: from a manifest to checked weights, whole or by deltas on those held.

```
manifest --deltas lead from what is held--> fetch them, change a copy -+-> check every tensor
         --otherwise----------------------> fetch the full set --------+
```

Whichever way they came, the manifest describes the full set, and every tensor of it is checked.
Nothing here touches the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from vcpo.wire.deltas import check_chain
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, verify
from vcpo_rollout.deltas import advance
from vcpo_rollout.engines.engine import PolicyWeights, WeightChanges
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.learner import HeldPolicy, Learner
from vcpo_rollout.pieces import Piece, PieceKey


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldSet:
    policy: HeldPolicy
    payload: bytes


class WeightSupply:
    """Fetches and checks versions. Owner: the worker's event loop.

    It keeps the newest full set, which the next deltas start from.
    """

    def __init__(self, learner: Learner, gauges: RolloutGauges) -> None:
        self._learner = learner
        self._gauges = gauges
        self._held: _HeldSet | None = None

    async def bring(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        """Return a version's weights; None when it was retired meanwhile.

        Raises:
            CorruptWeightsError: when what arrived is not that version; it names the tensor.
        """
        weights = await (self._by_deltas(manifest) if manifest.deltas else self._whole(manifest))
        if weights is not None:
            self._held = _HeldSet(policy=names_of(manifest), payload=weights.payload)
        return weights

    async def _whole(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        (payload,) = await self._fetch([Piece(_key(manifest), manifest.total_bytes)]) or (None,)
        if payload is None:
            return None
        await asyncio.to_thread(verify, payload, manifest)
        return PolicyWeights(policy_version=manifest.policy_version, payload=payload)

    async def _by_deltas(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        base = self._base_of(manifest)
        deltas = await self._fetch(
            [Piece(_key(manifest, entry), entry.total_bytes) for entry in manifest.deltas]
        )
        if deltas is None:
            return None
        return await asyncio.to_thread(_advanced, base, deltas, manifest)

    def _base_of(self, manifest: policy_pb2.PolicyManifest) -> _HeldSet:
        if self._held is None or self._held.policy.incarnation != manifest.incarnation:
            raise CorruptWeightsError("delta: starts from a version that is not held here")
        check_chain(
            manifest.deltas,
            base_policy_version=self._held.policy.policy_version,
            policy_version=manifest.policy_version,
        )
        return self._held

    async def _fetch(self, pieces: Iterable[Piece]) -> list[bytes] | None:
        """The bytes of pieces; None when one was retired."""
        contents = []
        for piece in pieces:
            if not await self._learner.fetch(piece):
                return None
            self._gauges.weights_fetched(piece.total_bytes)
            contents.append(piece.content())
        return contents


def names_of(manifest: policy_pb2.PolicyManifest) -> HeldPolicy:
    """The names of the version that a manifest describes."""
    return HeldPolicy(incarnation=manifest.incarnation, policy_version=manifest.policy_version)


def _key(
    manifest: policy_pb2.PolicyManifest, delta: policy_pb2.DeltaEntry | None = None
) -> PieceKey:
    return PieceKey(
        incarnation=manifest.incarnation,
        policy_version=delta.policy_version if delta else manifest.policy_version,
        base_policy_version=delta.base_policy_version if delta else None,
    )


def _advanced(
    base: _HeldSet, deltas: list[bytes], manifest: policy_pb2.PolicyManifest
) -> PolicyWeights:
    payload, positions = advance(base.payload, deltas)
    verify(payload, manifest)
    changes = WeightChanges(base_policy_version=base.policy.policy_version, positions=positions)
    return PolicyWeights(policy_version=manifest.policy_version, payload=payload, changes=changes)
