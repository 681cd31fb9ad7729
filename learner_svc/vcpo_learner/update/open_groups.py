"""Groups of trajectories that are measured together, in one micro-step or in several.

A group's slope depends on the norms of all of its trajectories. So its sums stay open until its
last trajectory is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import LossConfig
from vcpo_learner.device import to_device
from vcpo_learner.estimator.loss import group_offsets, group_slopes
from vcpo_learner.per_sample_gradients.slot_sums import SlotSums
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum
from vcpo_learner.update.batch_decision import split_groups


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
