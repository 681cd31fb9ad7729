"""The update of all ranks: what rank 0 asks of its own, the others do at the same time."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from vcpo.api.workloads import Precision
from vcpo.wire.packing import PackedLogprobs, PackedTokenIds, pack_logprobs
from vcpo.wire.trajectory import (
    FinishReason,
    TokenSpan,
    Trajectory,
    routes_from_message,
    spans_from_messages,
    trajectory_to_message,
    worker_of,
)
from vcpo.wire.v1 import work_pb2
from vcpo_learner.changed_elements import ChangedElements
from vcpo_learner.checkpoints.folder import state_bytes
from vcpo_learner.checkpoints.manifest import FileChecksum
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.update.pending_step import PendingStep
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.result import UpdateResult
from vcpo_learner.update.run_health import RunHealth

Groups = Sequence[Sequence[Trajectory]]
_SIZE_BYTES = 8
_FINISH_REASONS = {
    work_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    work_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class MirroredUpdate:
    """A `PolicyUpdate` on every rank, called on rank 0. Owner: the tensor thread.

    Every rank makes it, in the same way. Replay is with rank 0, which draws the batch.
    """

    def __init__(self, update: PolicyUpdate, commands: Commands, model: PreTrainedModel) -> None:
        """Mirror an update of a model that may be cut over the ranks."""
        self._update = update
        self._commands = commands
        self._published = PublishedState(model)
        self._pending: PendingStep | None = None
        """The step of the ranks other than 0, between `begin` and `finish`."""
        commands.on("begin", self._begin)
        commands.on("finish", self._finish)
        commands.on("rehearse", self._rehearse)
        commands.on("save_tensors", self._save_tensors)
        commands.on("load_tensors", self._load_tensors)
        commands.on("load_state_dict", self._load_state_dict)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks agree, and parameters and optimizer are of the same step."""
        return not self._commands.is_broken and self._update.is_whole

    @property
    def health(self) -> RunHealth:
        """Early warning after the steps so far; the same on all ranks."""
        return self._update.health

    def draw(self, groups: Groups) -> Groups:
        """Return the groups to train on; as `PolicyUpdate.draw`."""
        return self._update.draw(groups)

    def begin(self, groups: Groups, *, policy_version: int) -> PendingStep:
        """Compute the gradient of a batch; as `PolicyUpdate.begin`.

        Raises: also LostRankError, as `Commands.call`; so do the other methods.
        """
        groups, payload = self._sent(groups)
        return self._commands.call(
            "begin",
            lambda: self._update.begin(groups, policy_version=policy_version),
            fields={"policy_version": policy_version},
            payload=payload,
        )

    def finish(self, pending: PendingStep, newest: Sequence[Trajectory] = ()) -> UpdateResult:
        """Decide the step of the last `begin` and take it; as `PolicyUpdate.finish`."""
        groups, payload = self._sent([newest])
        return self._commands.call(
            "finish", lambda: self._update.finish(pending, groups[0]), payload=payload
        )

    def rehearse(self, group: Sequence[Trajectory], *, policy_version: int) -> None:
        """Compute the gradient of one group for nothing; as `PolicyUpdate.rehearse`."""
        groups, payload = self._sent([group])
        self._commands.call(
            "rehearse",
            lambda: self._update.rehearse(groups[0], policy_version=policy_version),
            fields={"policy_version": policy_version},
            payload=payload,
        )

    def forget(self, lease_ids: Collection[str]) -> dict[str, tuple[Trajectory, ...]]:
        """Discard the responses to these leases from replay; as `PolicyUpdate.forget`."""
        return self._update.forget(lease_ids)

    def take_weights(
        self, precision: Precision, policy_version: int
    ) -> bytearray | dict[str, ChangedElements]:
        """Return what this rank publishes of a new version; as `PublishedState.take`.

        Each of the others takes its own part, and publishes it: `ShardPublication`.
        """
        return self._commands.call(
            "take_weights",
            lambda: self._published.take(precision),
            fields={"precision": precision, "policy_version": policy_version},
        )

    def give_up(self) -> None:
        """Take another rank for lost: nothing is asked of the others any more."""
        self._commands.is_broken = True

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the tensors in a checkpoint, on all ranks together."""
        return self._update.checkpoint_bytes

    def save_tensors(self, folder: Path) -> Future[dict[str, FileChecksum]]:
        """Copy the parameters and moments of all ranks; as `PolicyUpdate.save_tensors`."""
        return self._commands.call(
            "save_tensors",
            lambda: self._update.save_tensors(folder),
            fields={"folder": str(folder)},
        )

    def load_tensors(self, folder: Path) -> None:
        """Continue, on all ranks, from saved tensors; as `PolicyUpdate.load_tensors`."""
        self._commands.call(
            "load_tensors",
            lambda: self._update.load_tensors(folder),
            fields={"folder": str(folder)},
        )

    def close(self) -> None:
        """Wait for the save in flight; every rank does so for itself."""
        self._update.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on; as `PolicyUpdate.state_dict`."""
        return self._update.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, on all ranks, from a `state_dict`; as `PolicyUpdate.load_state_dict`."""
        payload = b""
        if self._commands.has_followers:
            payload = state_bytes({**state, "replay": None})
        self._commands.call(
            "load_state_dict", lambda: self._update.load_state_dict(state), payload=payload
        )

    def _sent(self, groups: Groups) -> tuple[Groups, bytes]:
        """Return groups with the numbers that all ranks have, and their bytes for the others."""
        if not self._commands.has_followers:
            return groups, b""
        sent = as_sent(groups)
        return sent, groups_to_bytes(sent)

    def _save_tensors(self, fields: Mapping[str, Any], _: bytes) -> None:
        self._update.save_tensors(Path(fields["folder"]))

    def _load_tensors(self, fields: Mapping[str, Any], _: bytes) -> None:
        self._update.load_tensors(Path(fields["folder"]))

    def _load_state_dict(self, _: Mapping[str, Any], payload: bytes) -> None:
        self._update.load_state_dict(torch.load(io.BytesIO(payload), weights_only=True))

    def _begin(self, fields: Mapping[str, Any], payload: bytes) -> None:
        groups = groups_from_bytes(payload)
        self._pending = None
        self._pending = self._update.begin(groups, policy_version=fields["policy_version"])

    def _finish(self, fields: Mapping[str, Any], payload: bytes) -> None:
        if self._pending is None:
            raise RuntimeError("finish without begin: rank 0 sends them in turn")
        self._update.finish(self._pending, groups_from_bytes(payload)[0])

    def _rehearse(self, fields: Mapping[str, Any], payload: bytes) -> None:
        group = groups_from_bytes(payload)[0]
        self._update.rehearse(group, policy_version=fields["policy_version"])


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
        version_spans=spans_from_messages(message.version_spans),
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
