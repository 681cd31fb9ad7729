"""The gradient of a sharded model, slot by slot, from sums over the trajectories of all ranks.

A slot's sums leave a rank as soon as the backward pass has handed over the slot's last use. They
travel while the pass goes on, and are taken when those of the next slot leave, so two slots at a
time are in memory whole, in float32. A group's sums stay open by shard until its slope is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.slots import Slot, Slots
from vcpo_learner.ranks.ranks import REPLICATE, SHARD, Communication
from vcpo_learner.ranks.sharding import local_part

# From PyTorch 2.13 on the first name warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentSums:
    """Sums of a slot on their way to the shards."""

    slot: Slot
    rows: Tensor
    """[n, own rows, ...] that this rank will have of the sums over all shards."""
    works: Sequence[dist.Work]
    """What to wait for; it holds the memory of what is sent."""

    def wait(self) -> Tensor:
        """Return the rows; a GPU waits for them, and not its process."""
        for work in self.works:
            work.wait()
        return self.rows


class ShardedGradient:
    """The shards of a model's gradient on this rank. Owner: the update.

    Make it while every parameter is in shards: a gathered parameter is another object.
    """

    def __init__(self, slots: Slots, communication: Communication) -> None:
        self._parameters: dict[Slot, nn.Parameter] = {slot: slots.parameter(slot) for slot in slots}
        mesh = communication.mesh
        self._shards: dist.ProcessGroup = mesh[SHARD].get_group()
        self._replicas: dist.ProcessGroup = mesh[REPLICATE].get_group()

    def sums(self, num_groups: int) -> ShardedSums:
        return ShardedSums(self, num_groups)

    def local(self, slot: Slot) -> Tensor:
        """Return the rows of the gradient that this rank holds, to add to in place."""
        parameter = self._parameters[slot]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return local_part(parameter.grad)

    def zeros(self, slot: Slot, count: int) -> Tensor:
        """Return `count` sums of a slot to begin with, as `send` takes them.

        [count, rows, ...] with at least the slot's rows: FSDP cuts a slot into equal parts, and its
        last shards have fewer rows.
        """
        num_shards = self._shards.size()
        num_rows = num_shards * -(-slot.shape[0] // num_shards)
        return self.local(slot).new_zeros(count, num_rows, *slot.shape[1:])

    def send(self, slot: Slot, sums: Tensor) -> SentSums:
        """Begin to exchange sums for the rows that each shard holds of the sums over all shards.

        One sum follows the other, so that each goes from where it is: a slot may have gigabytes.
        """
        num_shards = self._shards.size()
        if num_shards == 1:
            return SentSums(slot=slot, rows=sums, works=())
        own = sums.new_empty(len(sums), sums.shape[1] // num_shards, *slot.shape[1:])
        works = [
            _reduce_scatter(rows.view(-1), whole.view(-1), group=self._shards, async_op=True)
            for rows, whole in zip(own, sums, strict=True)
        ]
        return SentSums(slot=slot, rows=own[:, : len(self.local(slot))], works=works)

    def finish(self) -> None:
        """Add up the gradients of the replicas, after the last micro-step of a batch."""
        if self._replicas.size() == 1:
            return
        for slot in self._parameters:
            dist.all_reduce(self.local(slot), group=self._replicas)


class ShardedSums:
    """The sums of some groups by shard; a `SlotSums`."""

    keeps_factors = False
    """Sums leave the rank before the slopes are known."""

    def __init__(self, gradient: ShardedGradient, num_groups: int) -> None:
        self.num_groups = num_groups
        """Groups whose slopes complete the sums."""
        self._gradient = gradient
        self._open: dict[Slot, Tensor] = {}
        """[1 + num_groups, rows, ...] of slots not closed yet, the weighted sum first."""
        self._by_group: dict[Slot, Tensor] = {}
        """[num_groups, rows of this rank, ...]"""
        self._sent: SentSums | None = None

    def weighted_sums(self, slots: Sequence[Slot]) -> list[Tensor]:
        return [self._whole(slot)[0, : slot.shape[0]] for slot in slots]

    def by_groups(self, slots: Sequence[Slot]) -> list[Tensor]:
        return [self._whole(slot)[1:, : slot.shape[0]] for slot in slots]

    def close(self, slot: Slot) -> None:
        """Exchange what the ranks have added in this micro-step for the rows that each holds."""
        sent = self._gradient.send(slot, self._whole(slot))
        del self._open[slot]
        self._take()
        self._sent = sent

    def complete(self, slopes: Sequence[float]) -> None:
        self._take()
        for slot, by_group in self._by_group.items():
            gradient = self._gradient.local(slot)
            for group_sum, slope in zip(by_group, slopes, strict=True):
                gradient.add_(group_sum, alpha=slope)
        self._by_group.clear()

    def _take(self) -> None:
        """Take over the sums that are on their way."""
        if self._sent is None:
            return
        slot, rows = self._sent.slot, self._sent.wait()
        self._gradient.local(slot).add_(rows[0])
        if slot in self._by_group:
            self._by_group[slot] += rows[1:]
        else:
            self._by_group[slot] = rows[1:].clone()
        self._sent = None

    def _whole(self, slot: Slot) -> Tensor:
        if slot not in self._open:
            self._open[slot] = self._gradient.zeros(slot, 1 + self.num_groups)
        return self._open[slot]
