"""One transfer of a full set or a delta, from whoever serves it."""

from __future__ import annotations

import asyncio

from vcpo.wire.limits import FETCH_TIMEOUT_S
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.pieces import Piece


async def receive_rest(
    policy: policy_pb2_grpc.PolicyServiceAsyncStub,
    worker_id: str,
    piece: Piece,
    *,
    stall_s: float | None = None,
) -> None:
    """Receive what a piece still lacks; what arrived stays in it when the transfer breaks.

    stall_s: how long to wait for the next chunk; None for as long as the call may last.

    Raises:
        grpc.aio.AioRpcError: when the transfer breaks or is refused.
        TimeoutError: when no chunk comes for `stall_s` seconds.
        CorruptWeightsError: when the chunks do not fit together, or end before the piece does.
    """
    if piece.is_complete:
        return
    request = policy_pb2.FetchRequest(
        worker_id=worker_id,
        incarnation=piece.key.incarnation,
        policy_version=piece.key.policy_version,
        base_policy_version=piece.key.base_policy_version,
        offset=piece.num_arrived,
    )
    call = policy.Fetch(request, timeout=FETCH_TIMEOUT_S)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(stall_s) as patience:
            async for chunk in call:
                piece.extend(chunk.offset, chunk.data)
                if stall_s is not None:
                    patience.reschedule(loop.time() + stall_s)
    finally:
        call.cancel()
    if not piece.is_complete:
        raise CorruptWeightsError(
            f"chunk: none follows {piece.num_arrived} of {piece.total_bytes} bytes"
        )
