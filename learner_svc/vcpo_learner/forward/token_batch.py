"""Trajectories as tensors of tokens, a batch of them or a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vcpo.wire.packing import ExpertRoutes, pack_token_ids
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.device import to_device
from vcpo_learner.forward.packed_rows import PackedRow, pack_row

UNKNOWN: Final = -1
"""Number that stands in the place of an expert where the router chooses for itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """A micro-batch: prompts and responses side by side, padded on the right to the longest."""

    input_ids: Tensor
    """[batch, width] int64; prompt, response, padding."""
    attention_mask: Tensor
    """[batch, width] int64; 1 on prompt and response, 0 on padding."""
    response_mask: Tensor
    """[batch, width] bool; True on trained tokens, those that the behavior policy sampled."""
    row: PackedRow | None = None
    """The row in which a model is given it; None for one trajectory per row."""
    expert_routes: Tensor | None = None
    """[batch, width, layers, choices] int32, experts of a mixture; UNKNOWN for tokens whose routers
    choose for themselves. None for all tokens."""

    def select_trained(self, values: Tensor) -> Tensor:
        return values[self.response_mask]

    def place_trained(self, values: Tensor) -> Tensor:
        nothing = values.new_zeros(self.response_mask.shape)
        return nothing.masked_scatter(self.response_mask, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTokens:
    """The tokens of a batch of trajectories, on the model's device."""

    num_tokens: Sequence[int]
    """[B] prompt and response together."""
    token_ids: Sequence[Tensor]
    """[B] of [tokens] int32, prompt and response; views of one tensor."""
    is_trained: Sequence[Tensor]
    """[B] of [tokens] bool, views of one tensor; True if the behavior policy sampled the token."""
    expert_routes: Sequence[Tensor | None] = ()
    """[B] of [first tokens, layers, choices] uint8 or uint16, on the CPU; empty: none is known."""

    def micro_batch(
        self,
        positions: Sequence[int],
        pad_token_id: int,
        *,
        packs: bool = False,
    ) -> TokenBatch:
        """Return some trajectories as a micro-batch, in this order.

        pad_token_id: any id of the vocabulary; the padding has no influence.
        packs: give the model all of them in one row, for an attention that is told their ends.
        """
        lengths = [self.num_tokens[at] for at in positions]
        token_ids = [self.token_ids[at] for at in positions]
        input_ids = pad_sequence(token_ids, batch_first=True, padding_value=pad_token_id).long()
        device = input_ids.device
        columns = torch.arange(input_ids.shape[1], device=device)
        is_token = columns < to_device(torch.tensor(lengths), device)[:, None]
        return TokenBatch(
            input_ids=input_ids,
            attention_mask=is_token.long(),
            response_mask=pad_sequence([self.is_trained[at] for at in positions], batch_first=True),
            row=pack_row(lengths, device) if packs else None,
            expert_routes=self._padded_routes(positions, input_ids),
        )

    def _padded_routes(self, positions: Sequence[int], input_ids: Tensor) -> Tensor | None:
        """The routes of some trajectories, laid out as their tokens [batch, width]."""
        own = [self.expert_routes[at] for at in positions] if self.expert_routes else []
        known = next((each for each in own if each is not None), None)
        if known is None:
            return None
        padded = torch.full((*input_ids.shape, *known.shape[1:]), UNKNOWN, dtype=torch.int32)
        for row, routes in zip(padded, own, strict=True):
            if routes is not None:
                row[: len(routes)] = routes
        return padded.to(input_ids.device)


def _routes(routes: ExpertRoutes | None) -> Tensor | None:
    if routes is None:
        return None
    dtype = torch.uint16 if routes.is_wide else torch.uint8
    shape = routes.num_tokens, routes.num_layers, routes.num_choices
    return torch.frombuffer(bytearray(routes.experts), dtype=dtype).view(shape)


def batch_tokens(trajectories: Sequence[Trajectory], device: torch.device) -> BatchTokens:
    """Return the tokens of trajectories as tensors on a device, in their order.

    Raises: ValueError if there is no trajectory, or one lacks a prompt or a response token.
    """
    if not trajectories:
        raise ValueError("trajectories is empty: at least one is needed")
    packed = [
        (pack_token_ids(each.prompt_token_ids), pack_token_ids(each.response_token_ids))
        for each in trajectories
    ]
    for trajectory, (prompt, response) in zip(trajectories, packed, strict=True):
        if not (prompt and response and trajectory.rollout_logprobs):
            _refuse_missing_tokens(trajectory)
    token_ids = torch.frombuffer(bytearray().join(chain.from_iterable(packed)), dtype=torch.int32)
    num_prompt_tokens = [len(prompt) // token_ids.itemsize for prompt, _ in packed]
    num_tokens = [
        start + len(response) // token_ids.itemsize
        for start, (_, response) in zip(num_prompt_tokens, packed, strict=True)
    ]
    is_trained = torch.ones(len(token_ids), dtype=torch.bool)
    rows = zip(torch.split(is_trained, num_tokens), num_prompt_tokens, trajectories, strict=True)
    for row, start, trajectory in rows:
        row[:start] = False
        for span in trajectory.inserted_spans:
            row[start + span.start : start + span.end] = False
    return BatchTokens(
        num_tokens=num_tokens,
        token_ids=torch.split(to_device(token_ids, device), num_tokens),
        is_trained=torch.split(to_device(is_trained, device), num_tokens),
        expert_routes=[_routes(each.expert_routes) for each in trajectories],
    )


def token_batch(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    device: torch.device,
    *,
    packs: bool = False,
) -> TokenBatch:
    """Return trajectories as one micro-batch; as `batch_tokens` and `BatchTokens.micro_batch`."""
    tokens, positions = batch_tokens(trajectories, device), range(len(trajectories))
    return tokens.micro_batch(positions, pad_token_id, packs=packs)


def _refuse_missing_tokens(trajectory: Trajectory) -> None:
    for field in ("prompt_token_ids", "response_token_ids", "rollout_logprobs"):
        if not getattr(trajectory, field):
            raise ValueError(
                f"{field} of trajectory {trajectory.trajectory_id!r} is empty: "
                "a policy scores at least one token, given at least one"
            )
