"""Sums for a chat model: an environment of one's own, beside the file of its run.

environment: {name: "sums:Sums", parameters: {values: [1, 99]}}
"""

import re
from random import Random

from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.draws import draw_item
from vcpo_rollout.environments.parameters import parse_span


class Sums:
    """The sum of two numbers; 1.0 if it is the last number in a response, else 0.0.

    values: smallest and largest number.
    """

    def __init__(self, *, seed: int, values: tuple[int, int] = (1, 99)) -> None:
        self._seed = seed
        self._values = parse_span("values", values, lowest=1, highest=1_000_000)

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a sum; its `answer` is the number."""
        first, second = draw_item(
            seed=self._seed,
            split=split,
            index=index,
            propose=self._propose,
            key=lambda pair: f"sums/{sorted(pair)}",  # 3 + 4 is in the split of 4 + 3
        )
        text = f"What is {first} + {second}? Answer with the number alone."
        return Prompt(text=text, answer=str(first + second))

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return 1.0 if the response's last number is the sum, else 0.0."""
        numbers = re.findall("[0-9]+", response)
        return float(numbers[-1:] == [prompt.answer])

    def _propose(self, random: Random) -> tuple[int, int]:
        return random.randint(*self._values), random.randint(*self._values)
