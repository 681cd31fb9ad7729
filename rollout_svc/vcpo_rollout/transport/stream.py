"""One transfer of a full set or a delta, from whoever serves it."""

from __future__ import annotations

import asyncio

from vcpo.wire.limits import CHUNK_BYTES, FETCH_TIMEOUT_S
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.transport.transfer_buffer import Transfer

LEAST_BYTES = CHUNK_BYTES
"""What a sender must send within each window; a chunk, so that a healthy one cannot be too slow
between two chunks of a slow one that it passes on."""


async def receive_rest(
    policy: policy_pb2_grpc.PolicyServiceAsyncStub,
    worker_id: str,
    transfer: Transfer,
    *,
    window_s: float | None = None,
) -> None:
    """Receive what a piece still lacks; what arrived stays in it when the transfer breaks.

    window_s: time for each `LEAST_BYTES`, or for the rest when that is less; None for as long as
        the call may last.

    Raises:
        grpc.aio.AioRpcError: when the transfer breaks or is refused.
        TimeoutError: when less comes within `window_s` seconds.
        CorruptWeightsError: when the chunks do not fit together, or end before the piece does.
    """
    if transfer.is_complete:
        return
    request = policy_pb2.FetchRequest(
        worker_id=worker_id,
        incarnation=transfer.key.incarnation,
        policy_version=transfer.key.policy_version,
        base_policy_version=transfer.key.base_policy_version,
        offset=transfer.num_arrived,
    )
    call = policy.Fetch(request, timeout=FETCH_TIMEOUT_S)
    loop = asyncio.get_running_loop()
    wanted_bytes = transfer.num_arrived + LEAST_BYTES
    try:
        async with asyncio.timeout(window_s) as patience:
            async for chunk in call:
                transfer.extend(chunk.offset, chunk.data)
                if window_s is not None and transfer.num_arrived >= wanted_bytes:
                    patience.reschedule(loop.time() + window_s)
                    wanted_bytes = transfer.num_arrived + LEAST_BYTES
    finally:
        call.cancel()
    if not transfer.is_complete:
        raise CorruptWeightsError(
            f"chunk: none follows {transfer.num_arrived} of {transfer.total_bytes} bytes"
        )
