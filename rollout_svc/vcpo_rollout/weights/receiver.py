"""Keeps the engine on the newest version: fetches it, verifies every tensor, and has it swapped in.

```
manifest --> shard 0: deltas from what is held, or also a full set --> patch, verify --+
             shard 1: ...                                                              +--> engine
```

Shards arrive side by side, each into its rows of one file of whole tensors: one may be patched by
deltas while another arrives whole, and one that is lost or corrupt leaves the others as they are.
All this runs beside generation; the engine stops only for the swap.

Nothing that fails a checksum is used. A set that has just arrived may hold elements of the next
version, whose deltas write them all: it is kept until then. If the check fails again, it is fetched
again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

import numpy as np

from vcpo.records.reasons import NO_UPDATES, WeightUpdates
from vcpo.service.logs import log_fields
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
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.engine import Engine, PolicyWeights, WeightChanges
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.transport.weight_files import ArrivingFile, RetiredVersionError, WeightFiles

_LOGGER = logging.getLogger(__name__)
_WAIT_S = 10.0
_SUMMARY_EVERY_S = 60.0
WAIT_AFTER_CORRUPTION_S = 5.0
"""Wait for another version after one whose check failed, before that one is fetched again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Longest pause before the newest version is asked for again after one that could not be read; it
doubles with every further failure."""
_SIDE_BY_SIDE: Final = 8
"""Shards that arrive at one time: enough to fill a network card from servers of their own."""
_Manifests = Sequence[policy_pb2.PolicyManifest]


class TornWeightsError(CorruptWeightsError):
    """A full set was patched while it arrived, or is damaged; later deltas may complete it."""


@dataclass(slots=True, kw_only=True, eq=False)
class WeightReceiver:
    """Brings versions from the learner into the engine. Owner: the worker's event loop.

    postprocess: turns a published version into the engine's; None changes nothing.
    adapters: who applies the adapters that versions consist of; None for other versions.
    """

    learner: LearnerClient
    engine: Engine
    gauges: RolloutGauges
    fetcher: WeightFetcher
    postprocess: Callable[[PolicyWeights], PolicyWeights] | None = None
    adapters: AdapterUse | None = None
    wait_after_corruption_s: float = WAIT_AFTER_CORRUPTION_S
    clock: Callable[[], float] = time.monotonic
    held: HeldPolicy | None = field(init=False, default=None)
    """Version in use; None before the first. Only this object writes it."""
    weight_updates: WeightUpdates = field(init=False, default=NO_UPDATES)
    """Counts of the versions that were swapped in so far. Only this object writes it."""
    _longest_pause_s: float = field(init=False, default=_FIRST_PAUSE_S)
    _swapped: asyncio.Condition = field(init=False, default_factory=asyncio.Condition)
    _durations_s: list[float] = field(init=False, default_factory=list)
    """Durations of the swaps since the last summary in the log."""
    _last_summary_s: float = field(init=False, default=-math.inf)

    async def wait_for_other(self, held: HeldPolicy | None) -> HeldPolicy:
        """Return the version in use once it differs from `held`; None stands for no version."""
        async with self._swapped:
            await self._swapped.wait_for(lambda: self.held != held)
            assert self.held is not None  # it never becomes None again
            return self.held

    async def run(self) -> None:
        """Fetch and swap in every new version, without end.

        Raises:
            EngineError: when the engine refuses a verified version.
        """
        while True:
            manifest = await self.learner.newest_policy(self.held, wait_s=_WAIT_S)
            self.gauges.hear_of_version(manifest.policy_version)
            if HeldPolicy.from_manifest(manifest) != self.held:
                fields = {"version": manifest.policy_version, "incarnation": manifest.incarnation}
                with log_fields(**fields):
                    await self._receive(manifest)

    async def _receive(self, manifest: policy_pb2.PolicyManifest) -> None:
        started_s = self.clock()
        version = manifest.policy_version
        try:
            weights = await self.fetcher.fetch(manifest)
        except CorruptWeightsError as error:
            if isinstance(error, TornWeightsError):
                text = "version %d was patched or damaged on its way; it is fetched again: %s"
                _LOGGER.info(text, version, error)
            else:
                _LOGGER.warning("version %d is corrupt and is fetched again: %s", version, error)
            await self.learner.newest_policy(
                HeldPolicy.from_manifest(manifest), wait_s=self.wait_after_corruption_s
            )
            return
        if weights is None:  # retired in the meantime, or a server is gone
            # Jitter spreads the requests of many workers.
            await asyncio.sleep(self._longest_pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            self._longest_pause_s = min(2 * self._longest_pause_s, _LONGEST_PAUSE_S)
            return
        self._longest_pause_s = _FIRST_PAUSE_S
        if self.postprocess is not None:
            weights = await asyncio.to_thread(self.postprocess, weights)
        num_running = await self.engine.swap_weights(weights)
        self.weight_updates += WeightUpdates(
            in_flight=int(num_running > 0),
            adapter_swaps=int(self.adapters is AdapterUse.SERVED),
            merged=int(self.adapters is AdapterUse.MERGED),
        )
        async with self._swapped:
            self.held = HeldPolicy.from_manifest(manifest)
            self._swapped.notify_all()
        duration_s = self.clock() - started_s
        self.gauges.record_swap(version, duration_s)
        self._log_swap(version, duration_s)

    def _log_swap(self, policy_version: int, duration_s: float) -> None:
        """Log each swap at the debug level, and a summary every `_SUMMARY_EVERY_S`."""
        _LOGGER.debug("version %d is in use after %.2f s", policy_version, duration_s)
        self._durations_s.append(duration_s)
        now_s, num_swaps = self.clock(), len(self._durations_s)
        if now_s - self._last_summary_s >= _SUMMARY_EVERY_S:
            _LOGGER.info(
                "version %d is in use; swaps since the last summary: %d, %.2f s each",
                policy_version,
                num_swaps,
                sum(self._durations_s) / num_swaps,
            )
            self._durations_s, self._last_summary_s = [], now_s


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
        size_bytes = len(header) + sum(num_bytes for *_, num_bytes in whole.values())
        content = np.empty(size_bytes, dtype=np.uint8)
        content[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        self.payload = content.data
        elements = elements_of(self.payload)
        for number, shard in enumerate(self._layout):
            for name, (_, shape, _) in shard.items():
                first = self.first_element(number, name)
                self.rows[number][name] = elements[name][first : first + math.prod(shape)]


@dataclass(slots=True, eq=False)
class _Shard:
    """One shard of the full set: the version that its rows have, or none."""

    _files: WeightFiles
    _set: _FullSet
    _number: int
    _held: HeldPolicy | None = None
    """Version of the rows; None if they have none."""
    _is_verified: bool = False
    """Whether they are that version; else some elements may be later ones."""
    _arriving: Sequence[ArrivingFile] = ()
    """What broke off, of the incarnation of the last manifest."""
    _incarnation: str = ""

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
