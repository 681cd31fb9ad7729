"""An environment of one's own: begin with a digit that is even or odd as the sum of the given ones.

environment: {name: "parity_task:Parity", parameters: {digits: 4}}
"""

from dataclasses import dataclass
from random import Random

from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.draws import draw_item


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The reward is 1 for a response whose first character is such a digit, else 0.

    Raises ValueError for a number of digits that is out of bounds.
    """

    seed: int
    """Decides which digits each index has; the run's seed."""
    digits: int = 4
    """Digits of a prompt, 2 to 64."""

    def __post_init__(self) -> None:
        if not 2 <= self.digits <= 64:
            raise ValueError(f"environment.parameters.digits: must be 2 to 64, got {self.digits}")

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return the prompt of an index: the same one at every call, and never in both splits."""
        digits = draw_item(
            seed=self.seed,
            split=split,
            index=index,
            propose=self._propose,
            key="parity/{}".format,
        )
        parity = sum(map(int, digits)) % 2
        return Prompt(text=f"parity {digits}=", answer=str(parity))

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return a number for any text: what the model writes is not under your control."""
        first = response.strip()[:1]
        return float(first in tuple("0123456789") and int(first) % 2 == int(prompt.answer))

    def _propose(self, random: Random) -> str:
        return "".join(random.choices("0123456789", k=self.digits))
