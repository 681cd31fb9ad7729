"""How stale the data of a study's subject was: the ESS ratio that its batches had, over a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from research.cells.records import CellRecord

PARTS: Final = 8
"""Parts of equal length into which the steps of a cell are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealisedEss:
    """One method at one lag and learning rate, over all of its seeds."""

    method: str
    lag: int
    learning_rate: float
    """As requested."""
    num_seeds: int
    ratios: tuple[float | None, ...]
    """ESS ratio over the on-policy one for each part of the run: the median over its steps, and of
    these the median over seeds. None where no batch of the part has a ratio."""


def realised_ess(records: Iterable[CellRecord], method: str) -> list[RealisedEss]:
    """Return a row for each lag above 0 and rate of a method, in order."""
    found: dict[tuple[int, float], list[Sequence[float | None]]] = defaultdict(list)
    for each in records:
        if each.method == method and each.lag > 0:
            found[each.lag, each.learning_rate].append(_by_part(each))
    return [
        RealisedEss(
            method=method,
            lag=lag,
            learning_rate=rate,
            num_seeds=len(seeds),
            ratios=tuple(_median(part) for part in zip(*seeds, strict=True)),
        )
        for (lag, rate), seeds in sorted(found.items())
    ]


def _by_part(record: CellRecord) -> list[float | None]:
    steps = record.steps
    ratios = [
        ess / reference if ess > 0.0 else None
        for ess, reference in zip(steps.ess_ratio, steps.on_policy_ess_ratio, strict=True)
    ]
    ends = [round(part * len(ratios) / PARTS) for part in range(PARTS + 1)]
    return [_median(ratios[start:end]) for start, end in pairwise(ends)]


def _median(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return median(known) if known else None
