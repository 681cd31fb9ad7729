"""Groups of trajectories as bytes, and back: the messages of the wire, one after another.

Rank 0 has checked what it got from the workers, so the other ranks do not check again. Numbers stay
packed as they came off the wire: no Python object per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vcpo.wire.packing import PackedLogprobs, PackedTokenIds, pack_logprobs
from vcpo.wire.trajectory import (
    FinishReason,
    TokenSpan,
    Trajectory,
    VersionSpan,
    routes_from_message,
    trajectory_to_message,
    worker_of,
)
from vcpo.wire.v1 import work_pb2

Groups = Sequence[Sequence[Trajectory]]

_SIZE_BYTES = 8
_FINISH_REASONS = {
    work_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    work_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def as_sent(groups: Groups) -> list[list[Trajectory]]:
    """Return groups with the numbers that the other ranks receive: log-probabilities in float32."""
    return [[_as_sent(each) for each in group] for group in groups]


def groups_to_bytes(groups: Groups) -> bytes:
    """Return groups as bytes; all of their fields but Python's types."""
    parts = [_size(len(groups))]
    for group in groups:
        parts.append(_size(len(group)))
        for trajectory in group:
            message = trajectory_to_message(trajectory).SerializeToString()
            parts += [_size(len(message)), message]
    return b"".join(parts)


def groups_from_bytes(data: bytes) -> list[list[Trajectory]]:
    """Read what `groups_to_bytes` returned."""
    view, at = memoryview(data), 0

    def size() -> int:
        nonlocal at
        at += _SIZE_BYTES
        return int.from_bytes(view[at - _SIZE_BYTES : at], "little")

    def trajectory() -> Trajectory:
        nonlocal at
        length = size()
        at += length
        return _trajectory(work_pb2.Trajectory.FromString(bytes(view[at - length : at])))

    return [[trajectory() for _ in range(size())] for _ in range(size())]


def _size(number: int) -> bytes:
    return number.to_bytes(_SIZE_BYTES, "little")


def _as_sent(trajectory: Trajectory) -> Trajectory:
    if isinstance(trajectory.rollout_logprobs, PackedLogprobs):
        return trajectory
    packed = PackedLogprobs(pack_logprobs(trajectory.rollout_logprobs))
    return replace(trajectory, rollout_logprobs=packed)


def _trajectory(message: work_pb2.Trajectory) -> Trajectory:
    return Trajectory(
        trajectory_id=message.trajectory_id,
        prompt_token_ids=PackedTokenIds(message.prompt_token_ids),
        response_token_ids=PackedTokenIds(message.response_token_ids),
        rollout_logprobs=PackedLogprobs(message.rollout_logprobs),
        version_spans=tuple(
            VersionSpan(policy_version=span.policy_version, num_tokens=span.num_tokens)
            for span in message.version_spans
        ),
        reward=message.reward,
        finish_reason=_FINISH_REASONS[message.finish_reason],
        inserted_spans=tuple(
            TokenSpan(start=span.start, num_tokens=span.num_tokens)
            for span in message.inserted_spans
        ),
        expert_routes=(
            routes_from_message(message.expert_routes)
            if message.HasField("expert_routes")
            else None
        ),
        worker_id=worker_of(message),
    )
