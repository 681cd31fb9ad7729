"""Receives one full set or delta of weights from the learner or a peer."""

from __future__ import annotations

import asyncio

from vcpo.wire.limits import CHUNK_BYTES, FETCH_TIMEOUT_S
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.transport.transfer_buffer import Transfer

LEAST_BYTES = CHUNK_BYTES
"""A sender must send this much within each window. It is one chunk: a healthy sender that passes on
a slow sender's chunks is then never slower than that sender."""


async def receive_rest(
    policy: policy_pb2_grpc.PolicyServiceAsyncStub,
    worker_id: str,
    transfer: Transfer,
    *,
    window_s: float | None = None,
) -> None:
    """Receive the missing bytes of a transfer; it keeps what arrived if the call breaks.

    window_s: time for each `LEAST_BYTES`, or for the rest if that is smaller; None sets no limit
        but the call's own.

    Raises:
        grpc.aio.AioRpcError: when the call breaks or is refused.
        TimeoutError: when too little arrives within `window_s` seconds.
        CorruptWeightsError: when the chunks do not fit together, or end before the transfer does.
    """
    if transfer.is_complete:
        return
    request = policy_pb2.FetchRequest(
        worker_id=worker_id,
        incarnation=transfer.key.incarnation,
        policy_version=transfer.key.policy_version,
        base_policy_version=transfer.key.base_policy_version,
        shard=transfer.key.shard,
        offset=transfer.num_arrived,
    )
    call = policy.Fetch(request, timeout=FETCH_TIMEOUT_S)
    loop = asyncio.get_running_loop()
    wanted_bytes = transfer.num_arrived + LEAST_BYTES
    try:
        async with asyncio.timeout(window_s) as window:
            async for chunk in call:
                transfer.extend(chunk.offset, chunk.data, chunk.policy_version)
                if window_s is not None and transfer.num_arrived >= wanted_bytes:
                    window.reschedule(loop.time() + window_s)
                    wanted_bytes = transfer.num_arrived + LEAST_BYTES
    finally:
        call.cancel()
    if not transfer.is_complete:
        raise CorruptWeightsError(
            f"chunk: the stream ended after {transfer.num_arrived} of {transfer.total_bytes} bytes"
        )
