"""The weight receiver: keeps the engine on the newest version it can get.

Fetching and checking happen beside generation; the engine stops only for the swap. A version whose
checksums do not hold is thrown away and fetched again; it is never used.
"""

from __future__ import annotations

import asyncio
import logging
import time

from vcpo.wire.v1 import policy_pb2
from vcpo.wire.weights import CorruptWeightsError, verify
from vcpo_rollout.engines.engine import Engine, PolicyWeights
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.learner import HeldPolicy, Learner

_LOGGER = logging.getLogger(__name__)
_WAIT_S = 10.0
_PAUSE_AFTER_CORRUPTION_S = 1.0


class WeightReceiver:
    """Brings versions from the learner into the engine. Owner of `held`."""

    def __init__(self, *, learner: Learner, engine: Engine, gauges: RolloutGauges) -> None:
        self.held: HeldPolicy | None = None
        """Version in use; None before the first."""
        self._learner = learner
        self._engine = engine
        self._gauges = gauges
        self._first = asyncio.Event()

    async def wait_for_first(self) -> None:
        """Return once the engine holds a version."""
        await self._first.wait()

    async def run(self) -> None:
        """Follow the learner for ever.

        Raises:
            EngineError: when the engine refuses a version that arrived intact.
        """
        while True:
            manifest = await self._learner.newest_policy(self.held, wait_s=_WAIT_S)
            if _names(manifest) != self.held:
                await self._receive(manifest)

    async def _receive(self, manifest: policy_pb2.PolicyManifest) -> None:
        started_s = time.monotonic()
        payload = await self._learner.fetch_policy(manifest)
        if payload is None:  # retired while we asked: there is a newer one
            return
        try:
            await asyncio.to_thread(verify, payload, manifest)
        except CorruptWeightsError:
            _LOGGER.exception("version %d is thrown away", manifest.policy_version)
            await asyncio.sleep(_PAUSE_AFTER_CORRUPTION_S)
            return
        weights = PolicyWeights(policy_version=manifest.policy_version, payload=payload)
        await self._engine.swap_weights(weights)
        self.held = _names(manifest)
        self._first.set()
        self._gauges.weights_received(
            manifest.policy_version, len(payload), time.monotonic() - started_s
        )


def _names(manifest: policy_pb2.PolicyManifest) -> HeldPolicy:
    return HeldPolicy(incarnation=manifest.incarnation, policy_version=manifest.policy_version)
