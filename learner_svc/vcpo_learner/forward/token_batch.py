"""Trajectories as padded tensors, and the split of a step's trajectories into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.wire.trajectory import Trajectory
from vcpo_learner.forward.packed_rows import PackedRows, packed_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """Prompts and responses side by side, padded on the right to the longest."""

    input_ids: Tensor
    """[batch, width] int64; prompt, response, padding."""
    attention_mask: Tensor
    """[batch, width] int64; 1 on prompt and response, 0 on padding."""
    response_mask: Tensor
    """[batch, width] bool; True on the tokens that were sampled and are trained on."""
    rollout_logprobs: Tensor
    """[batch, width] float64 nats, of the distribution that was sampled from; 0 elsewhere."""
    rows: PackedRows | None = None
    """How a model is given it; None for as it is, one trajectory to a row."""


def token_batch(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    device: torch.device,
    *,
    packs: bool = False,
) -> TokenBatch:
    """Trajectories as tensors on a device, in their order.

    pad_token_id: any id of the vocabulary; what stands in the padding influences nothing.
    packs: give the model several trajectories to a row, where that saves rows.
    Raises: ValueError when there is no trajectory, or one lacks a prompt or a response token.
    """
    if not trajectories:
        raise ValueError("trajectories is empty: at least one is needed")
    for trajectory in trajectories:
        _require_tokens(trajectory)
    lengths = [num_tokens(trajectory) for trajectory in trajectories]
    width = max(lengths)
    input_ids = torch.full((len(trajectories), width), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    response_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    rollout_logprobs = torch.zeros_like(input_ids, dtype=torch.float64)
    for row, trajectory in enumerate(trajectories):
        end = num_tokens(trajectory)
        tokens = (*trajectory.prompt_token_ids, *trajectory.response_token_ids)
        input_ids[row, :end] = torch.tensor(tokens)
        attention_mask[row, :end] = 1
        start = len(trajectory.prompt_token_ids)
        response_mask[row, start:end] = torch.tensor(trajectory.sampled_mask)
        rollout_logprobs[row, response_mask[row]] = torch.tensor(
            trajectory.rollout_logprobs, dtype=torch.float64
        )
    return TokenBatch(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        response_mask=response_mask.to(device),
        rollout_logprobs=rollout_logprobs.to(device),
        rows=packed_rows(lengths, device) if packs else None,
    )


def num_tokens(trajectory: Trajectory) -> int:
    """Length of prompt and response together, in tokens."""
    return len(trajectory.prompt_token_ids) + len(trajectory.response_token_ids)


def micro_batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Positions of `lengths`, shortest first, in runs of at most `size`.

    lengths: [n] tokens; neighbours in length share a micro-batch, so that little is padding.
    Returns: lists that hold each of 0..n-1 once; positions of equal length keep their order.
    Raises: ValueError when size is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}: a micro-batch holds at least 1 trajectory")
    order = sorted(range(len(lengths)), key=lambda position: lengths[position])
    return [order[start : start + size] for start in range(0, len(order), size)]


def group_micro_batches(groups: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Groups [num_groups][tokens of each trajectory], by position, in runs that are not split.

    A run holds whole groups of at most `size` trajectories together, shortest first as in
    `micro_batches`; a group larger than that has a run for itself.
    Raises: ValueError when size is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}: a micro-batch holds at least 1 trajectory")
    order = sorted(range(len(groups)), key=lambda position: max(groups[position]))
    runs: list[list[int]] = []
    room = 0
    for position in order:
        count = len(groups[position])
        if not runs or count > room:
            runs.append([])
            room = size
        runs[-1].append(position)
        room -= count
    return runs


def _require_tokens(trajectory: Trajectory) -> None:
    for field in ("prompt_token_ids", "response_token_ids", "rollout_logprobs"):
        if not getattr(trajectory, field):
            raise ValueError(
                f"{field} of trajectory {trajectory.trajectory_id!r} is empty: "
                "a policy scores at least one token, given at least one"
            )
