"""Brings the full set in memory to versions: whole, or by deltas, and verifies every tensor.

```
manifest --> shard 0: deltas from what is held, or also a full set --> patch, verify --+
             shard 1: ...                                                              +--> engine
```

Shards arrive side by side, each on its own: one may be patched by deltas while another arrives
whole, and one that is lost or corrupt leaves the others as they are. Nothing that fails a checksum
is used, or is a base for what comes later. This module does not touch the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vcpo.wire.deltas import chain_to
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import (
    CorruptWeightsError,
    delta_name,
    full_set_name,
    shards_of,
    verify,
)
from vcpo_rollout.engines.engine import PolicyWeights, WeightChanges, WeightShard
from vcpo_rollout.transport.learner_client import HeldPolicy
from vcpo_rollout.transport.weight_files import ArrivingFile, RetiredVersionError, WeightFiles
from vcpo_rollout.weights.deltas import apply_deltas

_LOGGER = logging.getLogger(__name__)
_SIDE_BY_SIDE: Final = 8
"""Shards that arrive at one time: enough to fill a network card from servers of their own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardVersion:
    """A shard of a version, complete and verified."""

    payload: bytearray
    """The full set in memory, which the next version patches."""
    base_policy_version: int | None = None
    """The version that was patched; None if the set arrived whole, or was here."""
    positions: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Rising positions in the shard's flat tensor that differ from the base, by tensor."""


class WeightFetcher:
    """Fetches and verifies versions. Owner: the worker's event loop.

    The payloads that it returns are the full set in memory, which the next `fetch` patches.
    """

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._shards: list[_Shard] = []
        self._is_failing = False
        """Whether the last fetch failed, so that the next failure is not logged."""

    async def fetch(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        """Return a version's weights; None if a manifest has to be asked for again.

        That is so if the learner retired the version in the meantime, or if its files cannot be
        read now. What arrived stays.

        Raises:
            CorruptWeightsError: when the received bytes are not that version, or the manifest
                describes none; names the tensor or the field.
        """
        manifests = shards_of(manifest)
        self._shards = self._shards[: len(manifests)]
        self._shards += [_Shard(self._files) for _ in manifests[len(self._shards) :]]
        turns = asyncio.Semaphore(_SIDE_BY_SIDE)

        async def bring(shard: _Shard, manifest: policy_pb2.PolicyManifest) -> ShardVersion:
            async with turns:
                return await shard.bring_to(manifest)

        results = await asyncio.gather(*map(bring, self._shards, manifests), return_exceptions=True)
        errors = [each for each in results if isinstance(each, BaseException)]
        for error in errors:
            if not isinstance(error, (OSError, RetiredVersionError)):
                raise error
        if errors:
            level = logging.DEBUG if self._is_failing else logging.WARNING
            text = f"{type(errors[0]).__name__}: {errors[0]}"
            _LOGGER.log(level, "version %d cannot be read: %s", manifest.policy_version, text)
            self._is_failing = True
            return None
        self._is_failing = False
        versions = [each for each in results if isinstance(each, ShardVersion)]
        return _put_together(manifests, versions)


class _Shard:
    """One shard of the version in memory, or nothing."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._held: HeldPolicy | None = None
        """Version of the payload, which is verified; None if there is none."""
        self._payload = bytearray()
        self._arriving: Sequence[ArrivingFile] = ()
        """What broke off, of the incarnation of the last manifest."""
        self._incarnation = ""

    async def bring_to(self, manifest: policy_pb2.PolicyManifest) -> ShardVersion:
        """Bring the shard to a version.

        manifest: of this shard.

        Raises:
            RetiredVersionError, OSError: as `WeightFiles.read`; what arrived stays.
            CorruptWeightsError: when the received bytes are not that version; names the tensor.
        """
        policy = HeldPolicy.from_manifest(manifest)
        if self._held == policy:
            return ShardVersion(payload=self._payload)
        held = self._held
        is_ours = held is not None and held.incarnation == manifest.incarnation
        base_version = held.policy_version if held is not None and is_ours else None
        if self._incarnation != manifest.incarnation:
            self._incarnation, self._arriving = manifest.incarnation, ()
        try:
            is_whole, deltas = chain_to(manifest, base_version)
            if is_whole:  # nothing leads on from what is here
                self._forget()
            # Deltas first: they are small, and an open file is read to its end, retired or not.
            files = [self._file(delta_name(each), each.total_bytes) for each in deltas]
            if is_whole:
                name = full_set_name(manifest.full_set_version)
                files.append(self._file(name, manifest.total_bytes))
            self._arriving = files
            await self._files.read(manifest, files)
            self._arriving = ()
            payload = files[-1].content if is_whole else self._payload
            self._forget()  # a set that is half patched is no base
            positions = await asyncio.to_thread(
                _patch, payload, manifest, [each.content for each in files[: len(deltas)]]
            )
        except (CorruptWeightsError, RetiredVersionError) as error:
            self._arriving = ()
            if isinstance(error, CorruptWeightsError):
                self._forget()  # the next fetch brings a whole set
            raise
        self._held, self._payload = policy, payload
        if is_whole:
            return ShardVersion(payload=payload)
        return ShardVersion(payload=payload, base_policy_version=base_version, positions=positions)

    def _file(self, name: str, total_bytes: int) -> ArrivingFile:
        """Return a file to read, with the bytes of it that have arrived."""
        for file in self._arriving:
            if file.name == name and file.total_bytes == total_bytes:
                return file
        return ArrivingFile(name=name, total_bytes=total_bytes)

    def _forget(self) -> None:
        self._held, self._payload = None, bytearray()


def _patch(
    payload: bytearray, manifest: policy_pb2.PolicyManifest, deltas: Sequence[bytearray]
) -> dict[str, NDArray[np.int64]]:
    """Write complete deltas into a full set and verify it; return what they changed.

    Raises:
        CorruptWeightsError: when the result is not the manifest's version.
    """
    positions = apply_deltas(payload, deltas)
    verify(payload, manifest)
    return positions


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
