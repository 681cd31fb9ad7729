"""Micro-steps: which rank runs which trajectories at a time. Pure, and equal on all ranks.

A micro-step is one pass of the model on every rank at once. Sharded parameters are gathered for it
by all ranks together, so every rank takes part in every micro-step, also if it has no trajectory. A
group stays in one replica and spreads over its shards; a large one over several micro-steps.

Trajectories of similar length run together. A micro-step costs as much as some tokens, whatever it
holds; more of them than the budget asks for are worth their while where they save more padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Final

import numpy as np

_STEP_TOKENS: Final = 1500
"""Tokens that a GPU computes while the host prepares a micro-step: .08 s at 18,000 a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace:
    """The place of a rank among all: replicas hold the same parameters, shards a part each."""

    num_replicas: int = 1
    num_shards: int = 1
    replica: int = 0
    shard: int = 0

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * self.num_shards

    @property
    def rank(self) -> int:
        return self.replica * self.num_shards + self.shard

    @property
    def of_one_replica(self) -> MeshPlace:
        return MeshPlace(num_shards=self.num_ranks, shard=self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchBudget:
    """The most that one rank runs at a time. A single trajectory may exceed `tokens`."""

    trajectories: int
    """Largest number of trajectories, at least 1."""
    tokens: int | None = None
    """Largest number of tokens, at least 1; None for no limit."""
    groups: int | None = None
    """Groups whose sums are in memory at a time, at least 1; None for no limit."""
    counts_padding: bool = True
    """Whether rows are padded to the longest trajectory, and their padding counts."""

    def __post_init__(self) -> None:
        for name in ("trajectories", "tokens", "groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: a micro-batch holds at least 1")

    def tokens_of(self, lengths: Sequence[int]) -> int:
        """Return the tokens that a model computes for trajectories of these lengths."""
        if self.counts_padding:
            return len(lengths) * max(lengths, default=0)
        return sum(lengths)

    def holds(self, count: int, num_tokens: int) -> bool:
        fits_tokens = self.tokens is None or num_tokens <= self.tokens
        return count == 1 or (count <= self.trajectories and fits_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledGroups:
    """One micro-step of a replica."""

    groups: tuple[int, ...] = ()
    """Numbers of its groups; empty if the replica is idle."""
    shards: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """[num_shards][groups] numbers of the trajectories of each group, within the group, that a
    shard runs; ascending."""
    is_last: bool = True
    """Whether it completes its groups; False if its only group goes on in the next micro-step."""


def micro_steps(
    lengths: Sequence[int], num_ranks: int, budget: MicroBatchBudget
) -> list[list[list[int]]]:
    """Return the positions of `lengths` by micro-step and rank, shortest first.

    lengths: [n] tokens, at least 1.
    Returns: [num_micro_steps][num_ranks] lists that together hold each of 0..n-1 once; an empty
    list is an idle rank. One rank: the cheapest split. Several: the largest micro-batch, in
    tokens, is the smallest possible for the number of micro-steps.
    """
    runs = _cheapest_runs(_by_length(lengths), lengths, num_ranks, budget)
    return [_fill_up(step, num_ranks) for step in _in_parts(runs, num_ranks)]


def group_micro_steps(
    groups: Sequence[Sequence[int]], num_replicas: int, num_shards: int, budget: MicroBatchBudget
) -> list[list[ScheduledGroups]]:
    """Return the micro-steps of one pass over whole groups, [num_replicas][num_micro_steps].

    groups: [num_groups][tokens of each trajectory], none empty.
    Each trajectory is in one shard of one micro-step, each group in one replica. A micro-step holds
    whole groups, those with the shortest first, or a part of one group that exceeds the budget of
    all shards. Every replica has the same number of micro-steps.
    """
    work = [budget.tokens_of(group) for group in groups]
    replicas = [
        _replica_micro_steps(groups, own, num_shards, budget)
        for own in _share_out(work, num_replicas)
    ]
    num_steps = max(map(len, replicas))
    idle = ScheduledGroups(shards=((),) * num_shards)
    return [steps + [idle] * (num_steps - len(steps)) for steps in replicas]


def fit(groups: Sequence[Sequence[int]], num_shards: int, budget: MicroBatchBudget) -> bool:
    """Return whether whole groups fit into one micro-step; groups: as for `group_micro_steps`."""
    if budget.groups is not None and len(groups) > budget.groups:
        return False
    if sum(map(len, groups)) > num_shards * budget.trajectories:
        return False
    lengths = list(chain.from_iterable(groups))
    return len(_runs(_by_length(lengths), lengths, budget)) <= num_shards


def _replica_micro_steps(
    groups: Sequence[Sequence[int]], own: Sequence[int], num_shards: int, budget: MicroBatchBudget
) -> list[ScheduledGroups]:
    steps: list[ScheduledGroups] = []
    left = sorted(own, key=lambda number: max(groups[number]))
    while left:
        rows = [groups[number] for number in left]
        # If some groups fit, so do fewer of them.
        num_fitting = bisect_right(
            range(1, len(rows) + 1), False, key=lambda num: not fit(rows[:num], num_shards, budget)
        )
        num_taken = max(num_fitting, 1)
        steps += _spread(left[:num_taken], groups, num_shards, budget)
        left = left[num_taken:]
    return steps


def _spread(
    numbers: Sequence[int],
    groups: Sequence[Sequence[int]],
    num_shards: int,
    budget: MicroBatchBudget,
) -> list[ScheduledGroups]:
    """Spread groups over the shards of one micro-step, or one large group over several."""
    places = [
        (slot, at) for slot, number in enumerate(numbers) for at in range(len(groups[number]))
    ]
    lengths = [groups[numbers[slot]][at] for slot, at in places]
    order = _by_length(lengths)
    is_one = len(_runs(order, lengths, budget)) <= num_shards
    cut = _even_runs if is_one else _cheapest_runs
    runs = cut(order, lengths, num_shards, budget)
    steps = list(_in_parts(runs, num_shards))
    return [
        ScheduledGroups(
            groups=tuple(numbers),
            shards=tuple(
                _members([places[index] for index in sorted(run)], len(numbers))
                for run in _fill_up(step, num_shards)
            ),
            is_last=step is steps[-1],
        )
        for step in steps
    ]


def _members(places: Iterable[tuple[int, int]], num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Group places (slot of the group, number in it) by slot."""
    members: list[list[int]] = [[] for _ in range(num_groups)]
    for slot, at in places:
        members[slot].append(at)
    return tuple(map(tuple, members))


def _by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def _runs(
    order: Sequence[int], lengths: Sequence[int], budget: MicroBatchBudget
) -> list[list[int]]:
    """Cut positions, ascending in length, into the fewest runs that fit the budget."""
    runs: list[list[int]] = []
    total = 0
    for position in order:
        length = lengths[position]
        total += length
        count = len(runs[-1]) + 1 if runs else 0
        if not count or not budget.holds(count, count * length if budget.counts_padding else total):
            runs.append([])
            total = length
        runs[-1].append(position)
    return runs


def _cheapest_runs(
    order: Sequence[int], lengths: Sequence[int], num_ranks: int, budget: MicroBatchBudget
) -> list[list[int]]:
    """Cut positions into runs so that the micro-steps of all ranks cost least."""
    runs = _runs(order, lengths, budget)
    if num_ranks == 1 or not runs:
        return _least_padded_runs(order, lengths, budget) if budget.counts_padding else runs
    fewest = -(-len(runs) // num_ranks)
    splits = (
        _even_runs(order, lengths, num_steps * num_ranks, budget)
        for num_steps in range(fewest, fewest + 5)
    )

    def waiting(runs: Sequence[list[int]]) -> int:
        sizes = (
            [budget.tokens_of([lengths[at] for at in run]) for run in step]
            for step in _in_parts(runs, num_ranks)
        )
        return sum(_STEP_TOKENS + max(step) for step in sizes)

    return min(splits, key=waiting)


def _least_padded_runs(
    order: Sequence[int], lengths: Sequence[int], budget: MicroBatchBudget
) -> list[list[int]]:
    """The cheapest split of the first n ends with a run after the cheapest split of fewer."""
    costs, starts = np.zeros(len(order) + 1), [0]
    for end, position in enumerate(order, start=1):
        length = lengths[position]
        most = end if budget.tokens is None else budget.tokens // length
        first = end - max(1, min(end, most, budget.trajectories))
        found = costs[first:end] + length * np.arange(end - first, 0, -1)
        starts.append(first + int(found.argmin()))
        costs[end] = found.min() + _STEP_TOKENS
    cuts = [len(order)]
    while cuts[-1]:
        cuts.append(starts[cuts[-1]])
    return [list(order[start:end]) for start, end in pairwise(reversed(cuts))]


def _even_runs(
    order: Sequence[int], lengths: Sequence[int], most: int, budget: MicroBatchBudget
) -> list[list[int]]:
    """Cut positions into at most so many runs that the largest one is as small as possible.

    With padding no other split into as many parts has a smaller largest one: to exchange
    trajectories so that one part has the longer ones widens no part.
    most: at least what the budget asks for.
    """
    low, high = 1, budget.tokens_of(lengths)
    if budget.tokens is not None:
        high = min(high, budget.tokens)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(order, lengths, replace(budget, tokens=middle))) <= most:
            high = middle
        else:
            low = middle + 1
    return _runs(order, lengths, replace(budget, tokens=high))


def _share_out(work: Sequence[int], num_parts: int) -> list[list[int]]:
    """Share positions out, the largest first, each to the part with the least work.

    No part has more than 4/3 of the work of the best split. Source: Graham 1969.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        part = totals.index(min(totals))
        parts[part].append(position)
        totals[part] += work[position]
    return [sorted(part) for part in parts]


def _in_parts(runs: Sequence[list[int]], size: int) -> Iterable[Sequence[list[int]]]:
    return (runs[start : start + size] for start in range(0, len(runs), size))


def _fill_up(runs: Sequence[list[int]], num_ranks: int) -> list[list[int]]:
    return [*runs, *[[] for _ in range(num_ranks - len(runs))]]
