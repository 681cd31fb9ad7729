"""What a worker counts of the versions that it takes, and the sums over workers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdates:
    """Numbers of policy versions that workers took."""

    in_flight: int = 0
    """Versions swapped in while sequences were being generated."""
    adapter_swaps: int = 0
    """Versions whose LoRA adapters an engine serves beside a base model."""
    merged: int = 0
    """Versions whose LoRA adapters a worker merged into full sets of weights."""

    def __add__(self, other: Self) -> Self:
        return self._with(other, 1)

    def __sub__(self, other: Self) -> Self:
        return self._with(other, -1)

    def _with(self, other: Self, sign: int) -> Self:
        names = (each.name for each in fields(self))
        return type(self)(**{n: getattr(self, n) + sign * getattr(other, n) for n in names})


NO_UPDATES: Final = WeightUpdates()
"""The updates of a worker that has taken no version."""
