"""The worker's view of other workers: sources of weights that may fail at any time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import grpc

from vcpo.wire.v1 import policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.fetching import receive_rest
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.pieces import Piece

_LOGGER = logging.getLogger(__name__)
_WINDOW_S = 5.0
"""Time for each `LEAST_BYTES` of a peer: 1 MiB in 5 s is a hundredth of a slow network, and at that
rate a model of 1 GB would take over an hour."""
_AVOIDED_S = 300.0
"""How long a peer that failed is not asked again; a worker that was restarted is well by then."""


class Peers:
    """Transfers from other workers. Nothing depends on them: the learner has what they lack.

    open_channel: Opens a channel to `host:port`.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        worker_id: str,
        gauges: RolloutGauges,
        window_s: float = _WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_channel = open_channel
        self._worker_id = worker_id
        self._gauges = gauges
        self._window_s = window_s
        self._clock = clock
        self._avoided_until_s: dict[str, float] = {}

    async def fetch(self, address: str, piece: Piece) -> int:
        """Receive what a peer gives of a piece's rest; returns its bytes.

        None come from a peer that failed lately.
        """
        if self._avoided_until_s.get(address, 0.0) > self._clock():
            return 0
        num_before = piece.num_arrived
        async with self._open_channel(address) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            try:
                await receive_rest(stub, self._worker_id, piece, window_s=self._window_s)
            except TimeoutError:
                self.avoid(address, "slow")
            except CorruptWeightsError:
                self.avoid(address, "corrupt")
            except grpc.aio.AioRpcError as error:
                # A peer that does not hold the version is as well as any.
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    self.avoid(address, "failed")
        return piece.num_arrived - num_before

    def avoid(self, address: str, reason: str) -> None:
        """Ask a peer for nothing for a time, because it was `slow`, `failed` or was `corrupt`."""
        now_s = self._clock()
        self._avoided_until_s = {
            name: until_s for name, until_s in self._avoided_until_s.items() if until_s > now_s
        }
        self._avoided_until_s[address] = now_s + _AVOIDED_S
        self._gauges.peer_avoided(reason)
        _LOGGER.info(
            "%s gives no weights (%s); it is not asked for %g s", address, reason, _AVOIDED_S
        )
