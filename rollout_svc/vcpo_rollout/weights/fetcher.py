"""Brings the full set in memory to versions: whole, or by deltas, and verifies every tensor.

```
manifest --> shard 0: deltas from what is held, or also a full set --> patch, verify --+
             shard 1: ...                                                              +--> engine
```

Shards arrive side by side, each into its rows of one file of whole tensors: one may be patched by
deltas while another arrives whole, and one that is lost or corrupt leaves the others as they are.
Nothing that fails a checksum is used.

A learner patches the full set in its memory while others read it, so a set that has just arrived
may hold elements of the next version and fail its check. It is kept until the next version is
there: that version's deltas write every such element. If the check fails again, it is thrown away.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from typing import Final

import numpy as np

from vcpo.wire.deltas import Bits, Positions, apply_deltas, chain_to, elements_of
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import (
    CorruptWeightsError,
    Payload,
    delta_name,
    element_bytes,
    file_header,
    full_set_name,
    shards_of,
    verify_layout,
    verify_tensors,
)
from vcpo_rollout.engines.engine import PolicyWeights, WeightChanges
from vcpo_rollout.transport.learner_client import HeldPolicy
from vcpo_rollout.transport.weight_files import ArrivingFile, RetiredVersionError, WeightFiles

_LOGGER = logging.getLogger(__name__)
_SIDE_BY_SIDE: Final = 8
"""Shards that arrive at one time: enough to fill a network card from servers of their own."""


class TornWeightsError(CorruptWeightsError):
    """A full set was patched while it arrived, or is damaged; later deltas may complete it."""


_Manifests = Sequence[policy_pb2.PolicyManifest]


class WeightFetcher:
    """Fetches and verifies versions. Owner: the worker's event loop.

    The payload that it returns is the full set in memory, which the next `fetch` patches.
    """

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._set = _FullSet(())
        self._shards: list[_Shard] = []
        self._is_failing = False
        """Whether the last fetch failed, so that the next failure is not logged."""

    async def fetch(self, manifest: policy_pb2.PolicyManifest) -> PolicyWeights | None:
        """Return a version's weights; None if a manifest has to be asked for again.

        That is so if the learner retired the version in the meantime, or if its files cannot be
        read now. What arrived stays.

        Raises:
            TornWeightsError: when the full set is not that version; a later one may use it.
            CorruptWeightsError: when the received bytes are not that version, or the manifest
                describes none; names the tensor or the field.
        """
        manifests = shards_of(manifest)
        if not self._set.holds(manifests):
            self._set = _FullSet(manifests)
            self._shards = [_Shard(self._files, self._set, each) for each in range(len(manifests))]
        turns = asyncio.Semaphore(_SIDE_BY_SIDE)

        async def bring(shard: _Shard, manifest: policy_pb2.PolicyManifest) -> WeightChanges | None:
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
        changes = [each for each in results if isinstance(each, WeightChanges)]
        return PolicyWeights(
            manifest.policy_version,
            self._set.payload,
            changes=_join(changes) if len(changes) == len(manifests) else None,
        )


class _FullSet:
    """A version's tensors as one safetensors file in memory, in which each shard has its rows."""

    def __init__(self, manifests: _Manifests) -> None:
        self._layout = _layout(manifests)
        self._is_in_one_shard = len(manifests) == 1
        self.payload: Payload = b""
        self.rows: list[dict[str, Bits]] = [{} for _ in manifests]
        """By shard: the elements of its rows of each tensor, flat, in the payload's memory."""
        self._allocating = Lock()

    def holds(self, manifests: _Manifests) -> bool:
        return self._layout == _layout(manifests)

    def first_element(self, shard: int, name: str) -> int:
        _, shape, first_row = self._layout[shard][name]
        return first_row * math.prod(shape[1:])

    def take(self, shard: int, content: bytearray) -> None:
        """Take a shard's file, whose layout is that of its manifest."""
        found = elements_of(content)
        if self._is_in_one_shard:
            self.payload, self.rows[shard] = content, found
            return
        with self._allocating:  # each shard arrives in a thread of its own
            if not self.payload:
                self._allocate()
        for name, rows in self.rows[shard].items():
            rows[:] = found[name].view(rows.dtype)

    def forget(self) -> None:
        if self._is_in_one_shard:
            self.payload, self.rows[0] = b"", {}

    def _allocate(self) -> None:
        """Lay out a file of whole tensors; its pages take memory as rows are written."""
        whole: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for shard in self._layout:
            for name, (dtype, shape, _) in shard.items():
                num_rows = shape[0] if shape else 0
                _, before, _ = whole.get(name, (dtype, (0, *shape[1:]) if shape else (), 0))
                joined = (before[0] + num_rows, *shape[1:]) if shape else ()
                whole[name] = dtype, joined, math.prod(joined) * element_bytes(dtype)
        # Those of wide elements first, so that each begins at a multiple of its elements' width.
        whole = dict(sorted(whole.items(), key=lambda each: -element_bytes(each[1][0])))
        header = file_header(whole)
        try:
            content = np.empty(
                len(header) + sum(num_bytes for *_, num_bytes in whole.values()), dtype=np.uint8
            )
        except MemoryError as error:
            raise CorruptWeightsError("payload: must fit into memory") from error
        content[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        self.payload = content.data
        elements = elements_of(self.payload)
        for number, shard in enumerate(self._layout):
            for name, (_, shape, _) in shard.items():
                first = self.first_element(number, name)
                self.rows[number][name] = elements[name][first : first + math.prod(shape)]


class _Shard:
    """One shard of the full set: the version that its rows have, or none."""

    def __init__(self, files: WeightFiles, full_set: _FullSet, number: int) -> None:
        self._files = files
        self._set = full_set
        self._number = number
        self._held: HeldPolicy | None = None
        """Version of the rows; None if they have none."""
        self._is_verified = False
        """Whether they are that version; else some elements may be later ones."""
        self._arriving: Sequence[ArrivingFile] = ()
        """What broke off, of the incarnation of the last manifest."""
        self._incarnation = ""

    async def bring_to(self, manifest: policy_pb2.PolicyManifest) -> WeightChanges | None:
        """Bring the rows to a version; return what changed, None if they arrived whole.

        manifest: of this shard.

        Raises:
            RetiredVersionError, OSError: as `WeightFiles.read`; what arrived stays.
            TornWeightsError, CorruptWeightsError: as `WeightFetcher.fetch`.
        """
        policy = HeldPolicy.from_manifest(manifest)
        if self._held == policy and self._is_verified:
            return None
        held, was_verified = self._held, self._is_verified
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
            self._held, self._is_verified = None, False  # a set that is half patched is no base
            whole = files.pop().content if is_whole else None
            changed = await asyncio.to_thread(
                self._patch, manifest, whole, [each.content for each in files]
            )
            try:
                rows = self._set.rows[self._number]
                await asyncio.to_thread(verify_tensors, rows, manifest)
            except CorruptWeightsError as error:
                if is_whole:
                    self._held = policy
                    raise TornWeightsError(str(error)) from error
                raise
        except (CorruptWeightsError, RetiredVersionError) as error:
            self._arriving = ()
            if isinstance(error, CorruptWeightsError) and not isinstance(error, TornWeightsError):
                self._forget()  # the next fetch brings a whole set
            raise
        self._held, self._is_verified = policy, True
        if base_version is None or is_whole or not was_verified:
            return None
        return WeightChanges(base_policy_version=base_version, positions=changed)

    def _patch(
        self,
        manifest: policy_pb2.PolicyManifest,
        whole: bytearray | None,
        deltas: Sequence[bytearray],
    ) -> dict[str, Positions]:
        """Write complete files into the rows.

        Returns: the changed positions in the whole flat tensors.
        """
        if whole is not None:
            verify_layout(whole, manifest)
            self._set.take(self._number, whole)
        rows = self._set.rows[self._number]
        changed = apply_deltas(rows, deltas)
        first = self._set.first_element
        return {name: first(self._number, name) + each for name, each in changed.items()}

    def _file(self, name: str, total_bytes: int) -> ArrivingFile:
        for file in self._arriving:
            if file.name == name and file.total_bytes == total_bytes:
                return file
        return ArrivingFile(name=name, total_bytes=total_bytes)

    def _forget(self) -> None:
        self._held, self._is_verified = None, False
        self._set.forget()


def _layout(manifests: _Manifests) -> list[dict[str, tuple[str, tuple[int, ...], int]]]:
    return [
        {each.name: (each.dtype, tuple(each.shape), each.first_row) for each in shard.tensors}
        for shard in manifests
    ]


def _join(changes: Sequence[WeightChanges]) -> WeightChanges | None:
    """Return the changes of all shards as one, if they are of the same version."""
    if len({each.base_policy_version for each in changes}) > 1:
        return None
    parts: defaultdict[str, list[Positions]] = defaultdict(list)
    for each in changes:
        for name, positions in each.positions.items():
            parts[name].append(positions)
    for found in parts.values():
        found.sort(key=lambda positions: int(positions[0]) if positions.size else -1)
    return WeightChanges(
        base_policy_version=changes[0].base_policy_version,
        positions={name: np.concatenate(found) for name, found in parts.items()},
    )
