"""The client of other workers, which serve weights and may fail at any time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc

from vcpo.wire.v1 import policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.stream import receive_rest
from vcpo_rollout.transport.transfer_buffer import Transfer

_LOGGER = logging.getLogger(__name__)
_WINDOW_S = 5.0
"""Time in which a peer must send `LEAST_BYTES`. 1 MiB in 5 s is a hundredth of a slow network; at
that rate a model of 1 GB would take over an hour."""
_LEAST_FETCH_S = 120.0
"""Time for all peers together to send a version. A larger version has more time, at
`_NETWORK_BYTES_PER_S`."""
_NETWORK_BYTES_PER_S = 10 << 20
"""A slow network with two workers on each sender. With a shorter limit every worker would fetch the
rest of a large version from the learner."""
_AVOIDED_S = 300.0
"""How long the worker does not ask a peer that failed; a restarted worker is ready by then."""


class PeerClient:
    """Fetches weights from other workers. It is optional: the learner has all that peers lack.

    open_channel: Opens a channel to `host:port`.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        worker_id: str,
        gauges: RolloutGauges,
        window_s: float = _WINDOW_S,
        least_fetch_s: float = _LEAST_FETCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_channel = open_channel
        self._worker_id = worker_id
        self._gauges = gauges
        self._window_s = window_s
        self._least_fetch_s = least_fetch_s
        self._clock = clock
        self._avoided_until_s: dict[str, float] = {}

    def deadline_s(self, num_bytes: int) -> float:
        """Return the time, on this client's clock, by which all peers must have sent the bytes."""
        return self._clock() + max(self._least_fetch_s, num_bytes / _NETWORK_BYTES_PER_S)

    async def fetch(self, address: str, transfer: Transfer, *, deadline_s: float) -> int:
        """Receive the rest of a transfer from a peer until the deadline; return the new bytes.

        Returns 0 without a call if the peer failed lately.
        """
        now_s = self._clock()
        if now_s >= deadline_s or self._avoided_until_s.get(address, 0.0) > now_s:
            return 0
        num_before = transfer.num_arrived
        async with self._open_channel(address) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            try:
                async with asyncio.timeout(deadline_s - now_s):
                    await receive_rest(stub, self._worker_id, transfer, window_s=self._window_s)
            except TimeoutError:
                self.avoid(address, "slow")
            except CorruptWeightsError:
                self.avoid(address, "corrupt")
            except grpc.aio.AioRpcError as error:
                # A peer that does not hold the version is healthy.
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    self.avoid(address, "failed")
        return transfer.num_arrived - num_before

    def avoid(self, address: str, reason: str) -> None:
        """Do not ask a peer for `_AVOIDED_S`; reason: `slow`, `failed` or `corrupt`."""
        now_s = self._clock()
        self._avoided_until_s = {
            name: until_s for name, until_s in self._avoided_until_s.items() if until_s > now_s
        }
        self._avoided_until_s[address] = now_s + _AVOIDED_S
        self._gauges.count_avoided_peer(reason)
        _LOGGER.info(
            "peer %s sent no usable weights (%s); this worker avoids it for %g s",
            address,
            reason,
            _AVOIDED_S,
        )
