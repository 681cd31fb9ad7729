"""Which version samples what, where the data of a batch is not all of one age."""

from __future__ import annotations

from random import Random

from research.study import Ages


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
