"""What a pass over a batch's trajectories is told beforehand, and what it saw."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from vcpo_learner.estimator.record import TokenLogprobs

LocalWeights = Callable[[TokenLogprobs], Tensor]
"""Weights a_it of some rows, from their log-probabilities; both [n, width]."""


SlopeOf = Callable[
    [Sequence[int], Sequence[float], Sequence[float], Sequence[Sequence[float]]], float
]
"""Slope of one group, from positions, offsets, squared norms and log-probabilities of its members.

Offsets that are all moved by some number move the slope by the opposite of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A forward pass that a backward pass can still go through."""

    positions: Sequence[int]
    """Where its trajectories stand in the batch."""
    logprobs: Tensor
    """[positions, width] nats."""
    mask: Tensor
    """[positions, width] bool; response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What a pass saw; sequences hold one entry per trajectory of the batch."""

    logprobs: Sequence[Sequence[float]]
    """Log-probability of each response token under the learner, nats."""
    squared_norms: Sequence[float]
    """||sum_t a_it grad log pi||^2 where it was measured, else 0."""
    graph: Graph | None = None
    """Of all trajectories that a second pass may use when one micro-batch held them, else None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnePass:
    """What the pass in one needs to know beforehand: c_i = offset_i + slope of i's group."""

    offsets: Sequence[float]
    """[batch]; trajectories of groups without any other than 0 are scored only."""
    slope_of: SlopeOf | None
    """None for slopes of 0, and then no norm is measured."""
