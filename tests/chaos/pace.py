"""How long a run may be silent before it hangs: judged by what is usual in the same run.

```
silence   time since the last sign of life: a step, or a process that starts or begins to serve
limit     a floor, plus some times the usual step; while a process starts, plus the usual start
```

The harness counts the silence from the end of a fault, so the length of the fault is not in it. A
loaded machine has longer steps, and so a longer limit.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

FLOOR_S: Final = 40.0
"""A lease that its worker lost takes ten seconds, a connection or a disk that is tried again five
to fifteen."""
_USUAL_STEPS: Final = 15.0
_USUAL_STARTS: Final = 4.0
LONGEST_S: Final = 600.0
"""Time in which a run must take a step, whatever it says meanwhile; and its first step."""
_LEAST_TO_JUDGE: Final = 5
"""Durations, below which nothing is usual yet."""


@dataclass(slots=True)
class Pace:
    """What is usual in a run."""

    steps_s: list[float] = field(default_factory=list)
    """Durations of steps, most of them in quiet times."""
    starts_s: list[float] = field(default_factory=list)
    """What processes took to serve."""
    longest_silence_s: float = 0.0
    """That was no hang."""

    def limit_s(self, *, is_starting: bool) -> float:
        """How long the run may be silent."""
        if len(self.steps_s) < _LEAST_TO_JUDGE:
            return LONGEST_S
        limit_s = FLOOR_S + _USUAL_STEPS * median(self.steps_s)
        if is_starting and self.starts_s:
            limit_s += _USUAL_STARTS * median(self.starts_s)
        return min(LONGEST_S, limit_s)


@dataclass(slots=True, kw_only=True)
class Silence:
    """The silence of a run since a fault."""

    pace: Pace
    since_s: float
    last: Hashable = None
    """The sign of life that was seen last."""
    _heard_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._heard_s = self.since_s

    def hear(self, sign: Hashable, now_s: float) -> None:
        """Take in what the run shows now; something else than before is a sign of life."""
        if sign != self.last:
            self.pace.longest_silence_s = max(self.pace.longest_silence_s, now_s - self._heard_s)
            self.last, self._heard_s = sign, now_s

    def is_hang(self, now_s: float, *, is_starting: bool) -> bool:
        too_long = now_s - self._heard_s > self.pace.limit_s(is_starting=is_starting)
        return too_long or now_s - self.since_s > LONGEST_S


def gaps(moments_s: Sequence[float]) -> list[float]:
    """Times between moments, in order."""
    return [later - earlier for earlier, later in pairwise(moments_s)]
