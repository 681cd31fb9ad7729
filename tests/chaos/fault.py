"""Faults, and the schedule that a seed gives: which fault, when, with what choices."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tests.chaos.answers import RESTARTING
from tests.chaos.kinds import Kind

_WEIGHT_OF_OTHERS: Final = 3
_LONGEST_PAUSE_S: Final = 0.5
_OVERLAPPING: Final = 0.3
"""Share of the faults that do not wait until the run has recovered from the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule."""

    number: int
    kind: Kind
    pause_s: float
    """Time before it."""
    overlaps: bool
    """Whether it comes while the run may still suffer from the one before."""
    seed: int
    """Of the choices that its injection makes."""


def schedule(seed: int, number: int, kinds: Collection[Kind] = tuple(Kind)) -> list[Fault]:
    """So many faults, each kind once or more often where there is room; a seed gives one schedule.

    kinds: those to choose from. Restarts are a third as frequent as the others.
    """
    draw, known = random.Random(seed), sorted(kinds)
    chosen = draw.sample(known, len(known))[:number]
    weights = [1 if kind in RESTARTING else _WEIGHT_OF_OTHERS for kind in known]
    chosen += draw.choices(known, weights, k=number - len(chosen))
    draw.shuffle(chosen)
    return [
        Fault(
            number=position + 1,
            kind=kind,
            pause_s=draw.uniform(0.0, _LONGEST_PAUSE_S),
            overlaps=draw.random() < _OVERLAPPING,
            seed=draw.getrandbits(32),
        )
        for position, kind in enumerate(chosen)
    ]


class NotInjectedError(Exception):
    """A fault could not be injected: what it disturbs was not there. It does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that really happened."""

    what: str
    """What was done to whom, in words."""
    sign: str | None = None
    """How the product had to show it; None if it may pass unnoticed, since nothing was wrong with
    the run."""
    is_shown: bool = True
