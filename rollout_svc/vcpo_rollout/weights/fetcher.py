"""Fetches versions, shard by shard, and puts the shards together.

```
manifest --> shard 0 --+
             shard 1 --+-> all at the version and verified --> the engine
             shard 2 --+   otherwise: ask again, holding the oldest of the shards' versions
```

Shards arrive side by side, each on its own (`shard_fetcher`): one may be patched by deltas while
another arrives whole, and one that is lost or corrupt leaves the others as they are. A shard that
is further than another waits for it: deltas that it has already are left out.
This module does not touch the engine.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, shards_of
from vcpo_rollout.engines.engine import PolicyWeights, WeightChanges, WeightShard
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.transport.peer_client import PeerClient
from vcpo_rollout.transport.transfer_buffer import TransferCache
from vcpo_rollout.weights.archive import ArchiveReader
from vcpo_rollout.weights.senders import WeightSenders
from vcpo_rollout.weights.shard_fetcher import FetchPlan, ShardFetcher, ShardVersion

_SIDE_BY_SIDE: Final = 8
"""Shards that arrive at one time: enough to fill a network card from servers of their own."""


class WeightFetcher:
    """Fetches and verifies versions, and serves them to peers. Owner: the worker's event loop.

    The payloads that it returns are the full set in memory, which the next `fetch` patches.

    peers: Asked before the learner; None asks no peer.
    archive: Read first for full sets, if the manifest says that they are archived.
    """

    def __init__(
        self,
        learner: LearnerClient,
        gauges: RolloutGauges,
        *,
        cache: TransferCache | None = None,
        peers: PeerClient | None = None,
        archive: ArchiveReader | None = None,
    ) -> None:
        self._senders = WeightSenders(learner, gauges, peers=peers, archive=archive)
        self._cache = cache or TransferCache()
        self._shards: list[ShardFetcher] = []
        self._incarnation = ""
        """Of the last manifest."""

    @property
    def base(self) -> HeldPolicy | None:
        """The oldest version of which a shard is here, to ask for deltas from; None: no shard is.

        Shards of other incarnations than the last manifest's do not count.
        """
        held = [shard.base for shard in self._shards]
        ours = [each for each in held if each is not None and each.incarnation == self._incarnation]
        return min(ours, key=lambda each: each.policy_version, default=None)

    @property
    def is_level(self) -> bool:
        """Whether all shards are at one version; if not, there is something to fetch already."""
        return len({shard.base for shard in self._shards}) == 1

    def lacks(self, manifest: policy_pb2.PolicyManifest) -> bool:
        """Whether a shard of a version is missing.

        A version that cannot be used before later deltas arrive is not missing.
        """
        policy = HeldPolicy.from_manifest(manifest)
        is_here = len(self._shards) == 1 + len(manifest.other_shards)
        return not is_here or any(shard.base != policy for shard in self._shards)

    async def fetch(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        """Return a version's weights; None if a manifest has to be asked for again.

        That is so if the learner retired the version in the meantime, if a sender patched it, or if
        a server that the manifest names cannot be reached. What arrived stays.

        Raises:
            CorruptWeightsError: when the received bytes are not that version, or the manifest
                describes none; names the tensor or the field.
        """
        manifests = shards_of(manifest)
        for number in range(len(manifests), len(self._shards)):
            self._cache.drop(number)
        self._shards = self._shards[: len(manifests)]
        for number in range(len(self._shards), len(manifests)):
            self._shards.append(ShardFetcher(number, self._senders, self._cache))
        self._incarnation = manifest.incarnation
        num_bytes = sum(
            sum(delta.total_bytes for delta in each.deltas) or each.total_bytes
            for each in manifests
        )
        plan = FetchPlan(
            peers=[manifest.peer, *manifest.other_peers] if manifest.peer else [],
            deadline_s=self._senders.deadline_s(num_bytes),
            turns=asyncio.Semaphore(_SIDE_BY_SIDE),
        )
        versions = await self._fetch_shards(manifests, plan)
        if any(each is None for each in versions):
            return None
        return _put_together(manifests, [each for each in versions if each is not None])

    async def _fetch_shards(
        self, manifests: Sequence[policy_pb2.PolicyManifest], plan: FetchPlan
    ) -> list[ShardVersion | None]:
        """Fetch all shards; one that is corrupt lets the others arrive.

        Raises:
            CorruptWeightsError: the first of the shards'.
        """
        corrupt: list[CorruptWeightsError] = []

        async def fetch(
            shard: ShardFetcher, manifest: policy_pb2.PolicyManifest
        ) -> ShardVersion | None:
            try:
                return await shard.fetch(manifest, plan)
            except CorruptWeightsError as error:
                corrupt.append(error)
                return None

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(fetch(shard, manifest))
                    for shard, manifest in zip(self._shards, manifests, strict=True)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if corrupt:
            raise corrupt[0]
        return [task.result() for task in tasks]


def _put_together(
    manifests: Sequence[policy_pb2.PolicyManifest], versions: Sequence[ShardVersion]
) -> PolicyWeights:
    """Return the whole version; its changes are known if every shard changed the same version."""
    shards = tuple(
        WeightShard(
            payload=version.payload,
            first_rows={each.name: each.first_row for each in manifest.tensors},
        )
        for manifest, version in zip(manifests, versions, strict=True)
    )
    bases = {version.base_policy_version for version in versions}
    base = bases.pop()
    changes = None
    if base is not None and not bases:
        changes = WeightChanges(
            base_policy_version=base, positions=whole_positions(manifests, versions)
        )
    policy_version = manifests[0].policy_version
    return PolicyWeights(policy_version=policy_version, shards=shards, changes=changes)


def whole_positions(
    manifests: Sequence[policy_pb2.PolicyManifest], versions: Sequence[ShardVersion]
) -> dict[str, NDArray[np.int64]]:
    """Return the shards' changes as rising positions in the flat whole tensors."""
    parts: defaultdict[str, list[tuple[int, NDArray[np.int64]]]] = defaultdict(list)
    for manifest, version in zip(manifests, versions, strict=True):
        for entry in manifest.tensors:
            if (changed := version.positions.get(entry.name)) is not None:
                row_elements = int(np.prod(entry.shape[1:], dtype=np.int64))
                parts[entry.name].append((entry.first_row * row_elements, changed))
    whole = {}
    for name, found in parts.items():
        found.sort(key=lambda part: part[0])
        whole[name] = np.concatenate([first + changed for first, changed in found])
    return whole
