"""The worker's view of other workers: sources of weights that may fail at any time."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from vcpo.wire.v1 import policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.fetching import receive_rest
from vcpo_rollout.pieces import Piece

_LOGGER = logging.getLogger(__name__)
_STALL_S = 5.0
"""A peer that sends nothing for this long is left; the learner has the rest."""


class Peers:
    """Transfers from other workers. Nothing depends on them: the learner has what they lack.

    open_channel: Opens a channel to `host:port`.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        worker_id: str,
        stall_s: float = _STALL_S,
    ) -> None:
        self._open_channel = open_channel
        self._worker_id = worker_id
        self._stall_s = stall_s

    async def fetch(self, address: str, piece: Piece) -> int:
        """Receive what a peer gives of a piece's rest; returns its bytes."""
        num_before = piece.num_arrived
        async with self._open_channel(address) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            try:
                await receive_rest(stub, self._worker_id, piece, stall_s=self._stall_s)
            except (grpc.aio.AioRpcError, TimeoutError, CorruptWeightsError) as error:
                _LOGGER.info("%s gave no weights (%s); asking the learner", address, error)
        return piece.num_arrived - num_before
