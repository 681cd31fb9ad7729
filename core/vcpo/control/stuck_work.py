"""When a piece of work is stuck: it takes far longer than the same work took before. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LEAST_LIMIT_S: Final = 120.0
"""Shortest limit, in seconds: a busy machine may delay work of milliseconds by as much."""
_TIMES_THE_LONGEST: Final = 10.0
"""A batch of the longest responses takes several times as long as a usual one, never as many."""
REMEMBERED: Final = 32
"""So many of the last durations count, or one odd piece would set the limit for ever."""


def work_limit_s(durations_s: Sequence[float], *, first_s: float, least_s: float) -> float:
    """Return for how long a piece of work may run until it counts as stuck, in seconds.

    durations_s: of earlier pieces of the same kind, the newest last.
    first_s: limit of a first piece, which may compile kernels or fill caches.
    least_s: below which no limit is; `LEAST_LIMIT_S`, or more where the work has deadlines of its
        own that say more.
    """
    if not durations_s:
        return max(first_s, least_s)
    return max(_TIMES_THE_LONGEST * max(durations_s[-REMEMBERED:]), least_s)
