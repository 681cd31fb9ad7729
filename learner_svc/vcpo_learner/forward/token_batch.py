"""Trajectories as tensors of tokens, a batch of them or a micro-batch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vcpo.wire.packing import ExpertRoutes, pack_token_ids
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.device import to_device
from vcpo_learner.forward.packed_rows import PackedRow, pack_row
from vcpo_learner.ranks.ranks import Ranks

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
    """The tokens of a batch of trajectories on the model's device, by position in the batch."""

    num_tokens: Sequence[int]
    """[B] prompt and response together."""
    token_ids: dict[int, Tensor] = field(default_factory=dict)
    """[tokens] int32, prompt and response."""
    is_trained: dict[int, Tensor] = field(default_factory=dict)
    """[tokens] bool; True if the behavior policy sampled the token."""
    expert_routes: dict[int, Tensor] = field(default_factory=dict)
    """[first tokens, layers, choices] uint8 or uint16, on the CPU; only where they are known."""

    def bring(self, wanted: Sequence[Iterable[int]]) -> None:
        """Get what this rank lacks of the trajectories that it is about to run.

        All ranks call it together. wanted: [ranks] positions, the same on all of them.
        """

    def lay_out(self, trajectories: Mapping[int, Trajectory], device: torch.device) -> None:
        """Add trajectories, by position; their tensors are views of one."""
        packed = [
            (pack_token_ids(one.prompt_token_ids), pack_token_ids(one.response_token_ids))
            for one in trajectories.values()
        ]
        ids = torch.frombuffer(bytearray().join(chain.from_iterable(packed)), dtype=torch.int32)
        is_trained = torch.ones(len(ids), dtype=torch.bool)
        num_tokens = [self.num_tokens[at] for at in trajectories]
        rows = torch.split(is_trained, num_tokens)
        for (at, one), row in zip(trajectories.items(), rows, strict=True):
            start = len(one.prompt_token_ids)
            row[:start] = False
            for span in one.inserted_spans:
                row[start + span.start : start + span.end] = False
            if one.expert_routes is not None:
                self.expert_routes[at] = _routes(one.expert_routes)
        for target, values in ((self.token_ids, ids), (self.is_trained, is_trained)):
            parts = torch.split(to_device(values, device), num_tokens)
            target.update(zip(trajectories, parts, strict=True))

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
        own = [self.expert_routes.get(at) for at in positions]
        known = next((each for each in own if each is not None), None)
        if known is None:
            return None
        padded = torch.full((*input_ids.shape, *known.shape[1:]), UNKNOWN, dtype=torch.int32)
        for row, routes in zip(padded, own, strict=True):
            if routes is not None:
                row[: len(routes)] = routes
        return padded.to(input_ids.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokensOnRanks(BatchTokens):
    """Tokens that rank 0 has; it gives another rank those of a trajectory that this first runs."""

    trajectories: Sequence[Trajectory]
    """[B]; on other ranks than 0 their tokens are not read."""
    ranks: Ranks
    held: Sequence[set[int]]
    """[ranks] positions whose tokens each rank has laid out."""

    def bring(self, wanted: Sequence[Iterable[int]]) -> None:
        lacking = [sorted(set(own) - held) for own, held in zip(wanted, self.held, strict=True)]
        for held, positions in zip(self.held, lacking, strict=True):
            held.update(positions)
        if not any(lacking):
            return
        given = lacking if self.ranks.is_leader else []
        parts = [{at: _for_layout(self.trajectories[at]) for at in own} for own in given]
        if own := self.ranks.hand_out(parts):
            self.lay_out(own, self.ranks.device)


def _for_layout(one: Trajectory) -> Trajectory:
    """Return a trajectory with its tokens, and without most that every rank knows."""
    return replace(
        one, rollout_logprobs=(), version_spans=(), reward_parts={}, question="", answer=""
    )


def _routes(routes: ExpertRoutes) -> Tensor:
    dtype = torch.uint16 if routes.is_wide else torch.uint8
    shape = routes.num_tokens, routes.num_layers, routes.num_choices
    return torch.frombuffer(bytearray(routes.experts), dtype=dtype).view(shape)


def batch_tokens(
    trajectories: Sequence[Trajectory], device: torch.device, ranks: Ranks | None = None
) -> BatchTokens:
    """Return the tokens of trajectories as tensors on a device, in their order.

    ranks: if there are several, each has tokens only after `bring`.

    Raises: ValueError if there is no trajectory, or one lacks a prompt or a response token.
    """
    if not trajectories:
        raise ValueError("trajectories is empty: at least one is needed")
    for each in trajectories:
        if not (each.prompt_token_ids and each.response_token_ids and each.rollout_logprobs):
            _refuse_missing_tokens(each)
    num_tokens = [len(one.prompt_token_ids) + len(one.response_token_ids) for one in trajectories]
    if ranks is not None and ranks.communication is not None:
        held: list[set[int]] = [set() for _ in range(ranks.size)]
        return TokensOnRanks(
            num_tokens=num_tokens, trajectories=trajectories, ranks=ranks, held=held
        )
    tokens = BatchTokens(num_tokens=num_tokens)
    tokens.lay_out(dict(enumerate(trajectories)), device)
    return tokens


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
    for name in ("prompt_token_ids", "response_token_ids", "rollout_logprobs"):
        if not getattr(trajectory, name):
            raise ValueError(
                f"{name} of trajectory {trajectory.trajectory_id!r} is empty: "
                "a policy scores at least one token, given at least one"
            )
