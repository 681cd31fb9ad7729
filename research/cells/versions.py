"""The last policy versions of a cell, and which of them samples what; the lag is exact."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from torch import Tensor
from transformers import PreTrainedModel

from research.study import Ages
from vcpo_learner.policy_state import policy_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Version:
    """One set of parameters; version n is the parameters after n steps."""

    number: int
    weights: Mapping[str, Tensor]


class Versions:
    """The newest k + 1 versions, for a lag of k."""

    def __init__(self, lag: int) -> None:
        self._held: deque[Version] = deque(maxlen=lag + 1)

    def add(self, weights: Mapping[str, Tensor]) -> None:
        number = self._held[-1].number + 1 if self._held else 0
        self._held.append(Version(number=number, weights=weights))

    @property
    def newest(self) -> Version:
        return self._held[-1]

    def since(self, lag: int) -> list[Version]:
        """Return the behavior policy of a lag and every version after it, oldest first.

        It is `lag` versions before the newest, or the oldest one held.
        """
        return list(self._held)[max(0, len(self._held) - 1 - lag) :]


def drawn_ages(ages: Ages | None, lag: int, *, seed: int, step: int, num_groups: int) -> list[int]:
    """Return the age of each group of a batch, in policy versions, 0 to `lag`.

    ages: None makes all of them as old as the lag. seed, step: the same ones draw the same ages.
    """
    if ages is None:
        return [lag] * num_groups
    random = Random(f"{seed}/ages/{step}")  # noqa: S311 - repeatable on purpose
    num_draws = 1 if ages.drawn_for == "batch" else num_groups
    drawn = [round(lag * random.choice(ages.shares)) for _ in range(num_draws)]
    return drawn if num_draws == num_groups else drawn * num_groups


def policy_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return copies of the state of a model of one rank on the CPU."""
    return {
        name: each.detach().to("cpu", copy=True).contiguous()
        for name, each in policy_state(model).items()
    }
