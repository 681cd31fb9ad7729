"""The model's passes over a batch, one micro-batch in memory at a time."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import LossConfig
from vcpo.api import VCPORunSpec
from vcpo.api.algorithm import RowLayout
from vcpo.api.workloads import Precision
from vcpo_learner.device import to_device
from vcpo_learner.estimator.loss import group_offsets, group_slopes
from vcpo_learner.forward.attention import select_attention
from vcpo_learner.forward.forward_pass import (
    PlainPass,
    RecordedPass,
    forward_pass,
    token_logprobs,
    weighted_logprobs,
)
from vcpo_learner.forward.kept_apart import require_kept_apart
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import BatchTokens, TokenBatch
from vcpo_learner.per_sample_gradients.slot_sums import SlotSums
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import is_sharded
from vcpo_learner.schedule.micro_steps import (
    MeshPlace,
    MicroBatchBudget,
    ScheduledGroups,
    fit,
    group_micro_steps,
    micro_steps,
)
from vcpo_learner.schedule.token_budget import MemoryBudget
from vcpo_learner.update.batch_decision import split_groups

_TRAJECTORIES_ON_A_CPU: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroStep:
    """What one rank runs while every other rank runs its own part."""

    positions: Sequence[int]
    """Positions of the rank's trajectories in the whole batch; empty if the rank is idle."""
    batch: TokenBatch
    """The rank's trajectories, in the order of `positions`. An idle rank runs a trajectory of
    another rank, because the model's parameters are gathered by all ranks together; it counts
    nowhere."""
    is_idle: bool

    def select_trained(self, values: Tensor) -> Tensor:
        return values[:0, 0] if self.is_idle else self.batch.select_trained(values)

    def place_trained(self, values: Tensor) -> Tensor:
        """Return values of trained tokens at their places, [batch, width], and 0 elsewhere."""
        if self.is_idle:
            return values.new_zeros(self.batch.response_mask.shape)
        return self.batch.place_trained(values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupMicroStep(MicroStep):
    """A micro-step over whole groups, or over a part of one that is larger than the budget."""

    numbers: Sequence[int]
    """Numbers of its groups, the same for all shards of a replica; empty if the replica is idle."""
    members: Sequence[Sequence[int]]
    """[groups] positions of each group's trajectories that the rank runs; may be empty."""
    is_last: bool
    """Whether it completes its groups; False if its only group goes on in the next micro-step."""


class MicroBatchRunner:
    """Splits batches and runs a model on the parts; holds nothing from one update to the next."""

    def __init__(
        self,
        model: nn.Module,
        spec: VCPORunSpec,
        pad_token_id: int,
        place: MeshPlace | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        """Take over a model.

        place: of this rank among all; None is the only one.
        memory: what every rank's device holds beside the model; None is no limit.
        """
        parameter = next(model.parameters())
        self.device = parameter.device
        self.logprob_dtype = torch.promote_types(parameter.dtype, torch.float32)
        """Number type of the log-probabilities that the model's passes return."""
        self._place = place or MeshPlace()
        self.temperature = spec.sampling.temperature
        self.network = PolicyNetwork.of(model)
        self.slots = Slots(self.network.model)
        self._pad_token_id = pad_token_id
        self.packs = spec.batch.row_layout is RowLayout.PACKED
        """Whether a micro-batch is one row without padding."""
        is_half = spec.learner.number_format is Precision.BFLOAT16
        select_attention(
            self.network.model, spec.learner.attention, packs=self.packs, is_half=is_half
        )
        unset = _TRAJECTORIES_ON_A_CPU if memory is None else spec.batch.trajectories
        held_tokens, held_groups = (memory.tokens, memory.groups) if memory else (None, None)
        self._budget = MicroBatchBudget(
            trajectories=spec.batch.micro_batch_trajectories or unset,
            tokens=spec.batch.tokens_per_micro_batch or held_tokens,
            groups=held_groups,
            counts_padding=not self.packs,
        )
        # A sharded model gathers its parameters in the number type of the run.
        self._use_bfloat16 = is_half and not is_sharded(parameter)
        self._is_half = parameter.dtype.itemsize == 2 or (is_half and is_sharded(parameter))
        for context, in_half in self.check_contexts():
            with context:
                self.network.compare_head()
                require_kept_apart(self.network, packs=self.packs, is_half=in_half)

    def check_contexts(self) -> list[tuple[AbstractContextManager[object], bool]]:
        """Return the contexts in which to check a model, and whether it computes in 16 bits there.

        In the number type of its parameters a mistake shows as such; in that of the step, where it
        is another one, the kernels are those of the step.
        """
        own: list[tuple[AbstractContextManager[object], bool]] = [(nullcontext(), self._is_half)]
        return [*own, (self.autocast(), True)] if self._use_bfloat16 else own

    def fits_one(self, tokens: BatchTokens, positions: Sequence[int]) -> bool:
        lengths = [tokens.num_tokens[at] for at in positions]
        return self._budget.holds(len(lengths), self._budget.tokens_of(lengths))

    def holds_each(self, tokens: BatchTokens, groups: Sequence[Sequence[int]]) -> bool:
        lengths = ([tokens.num_tokens[at] for at in group] for group in groups)
        return all(fit([group], self._place.num_shards, self._budget) for group in lengths)

    def split(
        self, tokens: BatchTokens, positions: Sequence[int], *, whole: bool = False
    ) -> Iterator[MicroStep]:
        """Yield this rank's micro-steps of a pass over the trajectories at these positions.

        whole: in one micro-step, of the only rank.
        """
        lengths = [tokens.num_tokens[at] for at in positions]
        schedule = micro_steps(lengths, self._place.num_ranks, self._budget)
        plan = [
            [[positions[index] for index in own] for own in step]
            for step in ([[range(len(positions))]] if whole else schedule)
        ]
        for own, batch in self._own(tokens, plan, positions):
            yield MicroStep(positions=own, batch=batch, is_idle=not own)

    def split_groups(
        self, tokens: BatchTokens, groups: Sequence[Sequence[int]]
    ) -> Iterator[GroupMicroStep]:
        """Yield this rank's micro-steps of a pass over groups of positions, none of them empty."""
        lengths = [[tokens.num_tokens[at] for at in group] for group in groups]
        place = self._place
        schedule = group_micro_steps(lengths, place.num_replicas, place.num_shards, self._budget)
        plan = [
            [
                list(chain.from_iterable(_members(groups, step, shard)))
                for step in steps
                for shard in range(place.num_shards)
            ]
            for steps in zip(*schedule, strict=True)
        ]
        runs = self._own(tokens, plan, list(chain.from_iterable(groups)))
        for step, (own, batch) in zip(schedule[place.replica], runs, strict=True):
            yield GroupMicroStep(
                positions=own,
                batch=batch,
                is_idle=not own,
                numbers=step.groups,
                members=_members(groups, step, place.shard),
                is_last=step.is_last,
            )

    def _own(
        self, tokens: BatchTokens, plan: Sequence[Sequence[list[int]]], among: Sequence[int]
    ) -> Iterator[tuple[list[int], TokenBatch]]:
        """Yield what this rank runs in each micro-step, positions and micro-batch.

        plan: [micro-steps][ranks] positions of `among`; a rank without any runs the shortest.
        """
        if not plan:
            return
        idle = [min(among, key=tokens.num_tokens.__getitem__)]
        by_rank = zip(*plan, strict=True)
        tokens.bring([chain.from_iterable(own or idle for own in steps) for steps in by_rank])
        for step in plan:
            own = step[self._place.rank]
            yield own, tokens.micro_batch(own or idle, self._pad_token_id, packs=self.packs)

    def forward(self, batch: TokenBatch, *, measures_norms: bool) -> RecordedPass | PlainPass:
        """Run the model forward, and keep what gradient norms need, if they are measured."""
        with self.autocast():
            return forward_pass(
                self.network,
                self.slots,
                batch,
                measures_norms=measures_norms,
                temperature=self.temperature,
            )

    def logprobs(self, batch: TokenBatch) -> Tensor:
        with self.autocast():
            return token_logprobs(self.network, batch, temperature=self.temperature)

    def autocast(self) -> AbstractContextManager[object]:
        if not self._use_bfloat16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def mesh_place(ranks: Ranks) -> MeshPlace:
    """Return the place of a rank as the schedule needs it."""
    return MeshPlace(
        num_replicas=ranks.num_replicas,
        num_shards=ranks.num_shards,
        replica=ranks.replica,
        shard=ranks.shard,
    )


def _members(groups: Sequence[Sequence[int]], step: ScheduledGroups, shard: int) -> list[list[int]]:
    """Return the positions that a shard runs in a micro-step, by group."""
    rows = zip(step.groups, step.shards[shard], strict=True)
    return [[groups[number][at] for at in chosen] for number, chosen in rows]


def backward(logprobs: Tensor, weights: Tensor) -> None:
    """Add the gradient of sum_it k_it log pi(y_it) to the parameters' `.grad`.

    logprobs: [batch, width] with their graph; weights: [batch, width] k_it, held constant.
    """
    torch.autograd.backward(weighted_logprobs(logprobs, weights).sum())


class OpenGroups:
    """The groups whose gradients are summed at the moment, from offsets to slopes."""

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        rewards: Tensor,
        squared_weights: Sequence[float] | None,
        sums: SlotSums,
        config: LossConfig,
        on_policy_weight: float = 1.0,
    ) -> None:
        """Open groups.

        members: [groups] positions of all trajectories of each group in the batch.
        rewards: [B] of the whole batch, shaped.
        squared_weights: sum_t a_it^2 of the members, one group after another; None if they are not
            all known yet, and then they count as equal.
        on_policy_weight: mean truncated weight that the batch would have on policy, in (0, 1].
        """
        self._members = members
        self._sizes = [len(group) for group in members]
        self._positions = list(chain.from_iterable(members))
        self._sums = sums
        self._config = config
        self._on_policy_weight = on_policy_weight
        squares = squared_weights or [1.0] * len(self._positions)
        self._offsets = group_offsets(
            self._by_group(rewards[self._positions].tolist()), self._by_group(squares), config
        )

    @property
    def positions(self) -> Sequence[int]:
        return self._positions

    def weighted_sum(self, parts: Sequence[Sequence[int]], like: Tensor) -> WeightedSum:
        """Return the sum that a micro-step adds to.

        parts: [groups] positions of the members that the micro-step runs, in their order there;
            none if the rank is idle, and then the one trajectory that it runs counts nowhere.
        like: whose type and device the offsets have.
        """
        known = dict(zip(self._positions, chain.from_iterable(self._offsets), strict=True))
        offsets = [known[at] for at in chain.from_iterable(parts)]
        groups = [number for number, part in enumerate(parts) for _ in part]
        numbers = to_device(torch.tensor(offsets or [0.0], dtype=like.dtype), like.device)
        return WeightedSum(offsets=numbers, groups=groups or [0], sums=self._sums)

    def slopes(self, log_weights: Sequence[float], squared_norms: Sequence[float]) -> list[float]:
        """Return what completes the coefficients of each group, [groups]; 0 where nothing can.

        A replica without a group has one slope, of what it adds to no gradient.
        log_weights, squared_norms: of all members. A step with a norm that is not finite is
        skipped; every rank finds that when it knows the whole batch, and none before the others.
        """
        try:
            slopes = group_slopes(
                self._offsets,
                self._by_group(squared_norms),
                self._by_group(log_weights),
                self._config,
                self._on_policy_weight,
            )
        except NonFiniteWeightError:
            slopes = [0.0] * len(self._members)
        return slopes or [0.0]

    def _by_group(self, values: Sequence[float]) -> list[list[float]]:
        return split_groups(values, self._sizes)
