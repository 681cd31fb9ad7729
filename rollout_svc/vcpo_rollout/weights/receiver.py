"""The weight receiver: keeps the engine on the newest version it can get.

Fetching and checking happen beside generation; the engine stops only for the swap. A version whose
checksums do not hold is thrown away and fetched again, whole; it is never used.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.engines.engine import Engine, PolicyWeights
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.weights.fetcher import WeightFetcher

_LOGGER = logging.getLogger(__name__)
_WAIT_S = 10.0
_SUMMARY_EVERY_S = 60.0
PAUSE_AFTER_CORRUPTION_S = 1.0
"""Pause before a version that arrived corrupt is fetched again."""


class WeightReceiver:
    """Brings versions from the learner into the engine. Owner of its public attributes."""

    def __init__(
        self,
        *,
        learner: LearnerClient,
        engine: Engine,
        gauges: RolloutGauges,
        fetcher: WeightFetcher | None = None,
        postprocess: Callable[[bytes, int], bytes] | None = None,
        pause_after_corruption_s: float = PAUSE_AFTER_CORRUPTION_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """postprocess: turns a published payload into the engine's; None changes nothing."""
        self.held: HeldPolicy | None = None
        """Version in use; None before the first."""
        self.updates_in_flight = 0
        """How many versions so far took over sequences under way."""
        self._learner = learner
        self._fetcher = fetcher or WeightFetcher(learner, gauges)
        self._distrusts_held = False
        """Whether the last version came to nothing: it may have been for what it started from."""
        self._engine = engine
        self._gauges = gauges
        self._postprocess = postprocess
        self._pause_after_corruption_s = pause_after_corruption_s
        self._swapped = asyncio.Condition()
        self._clock = clock
        self._durations_s: list[float] = []
        """Of the swaps that the log has not told."""
        self._told_s = -math.inf

    async def wait_for_other(self, held: HeldPolicy | None) -> HeldPolicy:
        """Return the version in use once it is another than `held`, which may be None for none."""
        async with self._swapped:
            await self._swapped.wait_for(lambda: self.held != held)
            assert self.held is not None  # nothing un-swaps
            return self.held

    async def run(self) -> None:
        """Follow the learner for ever.

        Raises:
            EngineError: when the engine refuses a version that arrived intact.
        """
        while True:
            base = None if self._distrusts_held else self.held
            manifest = await self._learner.newest_policy(base, wait_s=_WAIT_S)
            self._distrusts_held = False
            if HeldPolicy.from_manifest(manifest) != self.held:
                await self._receive(manifest)

    async def _receive(self, manifest: policy_pb2.PolicyManifest) -> None:
        started_s = self._clock()
        try:
            weights = await self._fetcher.fetch(manifest)
        except CorruptWeightsError as error:
            version = manifest.policy_version
            _LOGGER.warning("version %d is thrown away and fetched again: %s", version, error)
            self._distrusts_held = True
            await asyncio.sleep(self._pause_after_corruption_s)
            return
        if weights is None:  # retired while we asked: there is a newer one
            return
        if await self._engine.swap_weights(await self._prepared(weights)) > 0:
            self.updates_in_flight += 1
            self._gauges.count_in_flight_update()
        async with self._swapped:
            self.held = HeldPolicy.from_manifest(manifest)
            self._swapped.notify_all()
        duration_s = self._clock() - started_s
        self._gauges.record_swap(manifest.policy_version, duration_s)
        self._tell(manifest.policy_version, duration_s)

    def _tell(self, policy_version: int, duration_s: float) -> None:
        """Write of swaps now and then; of each one only when debugging."""
        _LOGGER.debug("version %d is in use after %.2f s", policy_version, duration_s)
        self._durations_s.append(duration_s)
        now_s, num_swaps = self._clock(), len(self._durations_s)
        if now_s - self._told_s >= _SUMMARY_EVERY_S:
            _LOGGER.info(
                "version %d is in use; swaps since the last such line: %d, %.2f s each",
                policy_version,
                num_swaps,
                sum(self._durations_s) / num_swaps,
            )
            self._durations_s, self._told_s = [], now_s

    async def _prepared(self, weights: PolicyWeights) -> PolicyWeights:
        """What the engine uses of a version; elements that were not published anew may differ."""
        if self._postprocess is None:
            return weights
        version = weights.policy_version
        payload = await asyncio.to_thread(self._postprocess, weights.payload, version)
        return PolicyWeights(policy_version=version, payload=payload)
