"""Keeps the engine on the newest version of the policy.

Versions are fetched and verified beside generation; the engine stops only for the swap. The worker
never uses a corrupt version: it completes a set that was patched while it arrived by the next
version's deltas, or fetches the full set again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable

from vcpo.records.weight_updates import NO_UPDATES, WeightUpdates
from vcpo.service.logs import log_fields
from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.engine import Engine, PolicyWeights
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.weights.fetcher import TornWeightsError, WeightFetcher

_LOGGER = logging.getLogger(__name__)
_WAIT_S = 10.0
_SUMMARY_EVERY_S = 60.0
WAIT_AFTER_CORRUPTION_S = 5.0
"""Wait for another version after one whose check failed, before that one is fetched again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Longest pause before the newest version is asked for again after one that could not be read; it
doubles with every further failure."""


class WeightReceiver:
    """Brings versions from the learner into the engine. Owner: the worker's event loop."""

    def __init__(
        self,
        *,
        learner: LearnerClient,
        engine: Engine,
        gauges: RolloutGauges,
        fetcher: WeightFetcher,
        postprocess: Callable[[PolicyWeights], PolicyWeights] | None = None,
        adapters: AdapterUse | None = None,
        wait_after_corruption_s: float = WAIT_AFTER_CORRUPTION_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fetch nothing yet; `run` does.

        postprocess: turns a published version into the engine's; None changes nothing.
        adapters: who applies the adapters that versions consist of; None for other versions.
        """
        self.held: HeldPolicy | None = None
        """Version in use; None before the first. Only this object writes it."""
        self.weight_updates = NO_UPDATES
        """Counts of the versions that were swapped in so far. Only this object writes it."""
        self._learner = learner
        self._fetcher = fetcher
        self._engine = engine
        self._gauges = gauges
        self._postprocess = postprocess
        self._adapters = adapters
        self._wait_after_corruption_s = wait_after_corruption_s
        self._longest_pause_s = _FIRST_PAUSE_S
        self._swapped = asyncio.Condition()
        self._clock = clock
        self._durations_s: list[float] = []
        """Durations of the swaps since the last summary in the log."""
        self._last_summary_s = -math.inf

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
            manifest = await self._learner.newest_policy(self.held, wait_s=_WAIT_S)
            self._gauges.hear_of_version(manifest.policy_version)
            if HeldPolicy.from_manifest(manifest) != self.held:
                fields = {"version": manifest.policy_version, "incarnation": manifest.incarnation}
                with log_fields(**fields):
                    await self._receive(manifest)

    async def _receive(self, manifest: policy_pb2.PolicyManifest) -> None:
        started_s = self._clock()
        version = manifest.policy_version
        try:
            weights = await self._fetcher.fetch(manifest)
        except CorruptWeightsError as error:
            if isinstance(error, TornWeightsError):
                text = "version %d was patched or damaged on its way; it is fetched again: %s"
                _LOGGER.info(text, version, error)
            else:
                _LOGGER.warning("version %d is corrupt and is fetched again: %s", version, error)
            await self._learner.newest_policy(
                HeldPolicy.from_manifest(manifest), wait_s=self._wait_after_corruption_s
            )
            return
        if weights is None:  # retired in the meantime, or a server is gone
            # Jitter spreads the requests of many workers.
            await asyncio.sleep(self._longest_pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            self._longest_pause_s = min(2 * self._longest_pause_s, _LONGEST_PAUSE_S)
            return
        self._longest_pause_s = _FIRST_PAUSE_S
        if self._postprocess is not None:
            weights = await asyncio.to_thread(self._postprocess, weights)
        num_running = await self._engine.swap_weights(weights)
        self.weight_updates += WeightUpdates(
            in_flight=int(num_running > 0),
            adapter_swaps=int(self._adapters is AdapterUse.SERVED),
            merged=int(self._adapters is AdapterUse.MERGED),
        )
        async with self._swapped:
            self.held = HeldPolicy.from_manifest(manifest)
            self._swapped.notify_all()
        duration_s = self._clock() - started_s
        self._gauges.record_swap(version, duration_s)
        self._log_swap(version, duration_s)

    def _log_swap(self, policy_version: int, duration_s: float) -> None:
        """Log each swap at the debug level, and a summary every `_SUMMARY_EVERY_S`."""
        _LOGGER.debug("version %d is in use after %.2f s", policy_version, duration_s)
        self._durations_s.append(duration_s)
        now_s, num_swaps = self._clock(), len(self._durations_s)
        if now_s - self._last_summary_s >= _SUMMARY_EVERY_S:
            _LOGGER.info(
                "version %d is in use; swaps since the last summary: %d, %.2f s each",
                policy_version,
                num_swaps,
                sum(self._durations_s) / num_swaps,
            )
            self._durations_s, self._last_summary_s = [], now_s
