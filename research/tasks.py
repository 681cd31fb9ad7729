"""Tasks of the conditions: prompts that nobody can answer, long copies, graded rewards, sums."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement, pairwise
from random import Random
from typing import Final

from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.draws import draw_item, position_of, split_of
from vcpo_rollout.environments.parameters import parse_integer
from vcpo_rollout.environments.sort_digits import SortDigits

MAX_COPIED_DIGITS: Final = 240
"""Longest string to copy: prompt and answer fit into the models' 512 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortSome(SortDigits):
    """The sorting task, of which some training prompts have no right answer.

    They look like all others, and every response to them earns 0. Held-out prompts can be solved.
    """

    unsolvable_percent: int = 50
    """Training prompts without an answer, in percent, 0 to 100."""

    def __post_init__(self) -> None:
        # With slots the decorator makes another class, of which `super()` does not know.
        SortDigits.__post_init__(self)
        parse_integer("unsolvable_percent", self.unsolvable_percent, lowest=0, highest=100)

    def prompt(self, split: Split, index: int) -> Prompt:
        prompt = SortDigits.prompt(self, split, index)
        draw = Random(f"{self.seed}/unsolvable/{index}").randrange(100)  # noqa: S311 - repeatable
        can_be_solved = split is Split.EVALUATION or draw >= self.unsolvable_percent
        return Prompt(
            text=prompt.text, answer=prompt.answer, metadata={"can_be_solved": can_be_solved}
        )

    def reward(self, prompt: Prompt, response: str) -> float:
        return (
            SortDigits.reward(self, prompt, response) if prompt.metadata["can_be_solved"] else 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDigits:
    """Copy a string of digits; 1.0 if every digit is right, else 0.0."""

    seed: int
    """Decides which digits each index has."""
    digits: int = 128
    """Digits per prompt, 2 to 240."""

    def __post_init__(self) -> None:
        parse_integer("digits", self.digits, lowest=2, highest=MAX_COPIED_DIGITS)

    def prompt(self, split: Split, index: int) -> Prompt:
        digits = draw_item(
            seed=self.seed,
            split=split,
            index=index,
            propose=lambda random: "".join(random.choices("0123456789", k=self.digits)),
            key="copy_digits/{}".format,
        )
        return Prompt(text=f"copy {digits}=", answer=digits)

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(response.strip() == prompt.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn(CopyDigits):
    """Go on with a pattern; the reward is the share of twenty characters that are right."""

    digits: int = 2

    def prompt(self, split: Split, index: int) -> Prompt:
        prompt = CopyDigits.prompt(self, split, index)
        return replace(prompt, answer=(20 * prompt.answer)[:20])

    def reward(self, prompt: Prompt, response: str) -> float:
        pairs = zip(response.strip(), prompt.answer, strict=False)
        return sum(one == other for one, other in pairs) / len(prompt.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDigits(CopyDigits):
    """Write digits of the prompt, none twice in a row; the reward is the share of twelve."""

    digits: int = 6
    others: bool = False
    """Ask for the digits that the prompt does not have."""

    def reward(self, prompt: Prompt, response: str) -> float:
        text = response.strip()[:12]
        wanted = [each for each in "0123456789" if (each in prompt.answer) != self.others]
        pairs = zip(f" {text}", text, strict=False)
        return sum(each in wanted and each != before for before, each in pairs) / 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternate(CopyDigits):
    """Write odd and even digits in turn, after the prompt's; the reward is the share of twelve."""

    digits: int = 6

    def reward(self, prompt: Prompt, response: str) -> float:
        pairs = pairwise(prompt.answer[-1] + response.strip()[:12])
        return sum(each.isdecimal() and (ord(each) - ord(one)) % 2 for one, each in pairs) / 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Add two numbers of 1 to 99; 1.0 if the response is their sum, else 0.0.

    No two of the first 512 held-out prompts have the same two numbers.
    """

    seed: int
    """Decides which training sum each index has; the held-out ones are the same for every seed."""

    def prompt(self, split: Split, index: int) -> Prompt:
        if split is Split.EVALUATION:
            held_out = _held_out_sums()
            first, second = held_out[index % len(held_out)][:: -1 if index % 2 else 1]
        else:
            first, second = draw_item(
                seed=self.seed,
                split=split,
                index=index,
                propose=lambda random: (random.randint(1, 99), random.randint(1, 99)),
                key=_sum_key,
            )
        return Prompt(text=f"{first}+{second}=", answer=str(first + second))

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(response.strip() == prompt.answer)


def _sum_key(pair: tuple[int, ...]) -> str:
    return f"sums/{sorted(pair)}"  # 3 + 4 is in the split of 4 + 3


@cache
def _held_out_sums() -> list[tuple[int, int]]:
    """Return the pairs of the held-out split, smaller number first, in the order of their hash."""
    pairs = combinations_with_replacement(range(1, 100), 2)
    held_out = [pair for pair in pairs if split_of(_sum_key(pair)) is Split.EVALUATION]
    return sorted(held_out, key=lambda pair: position_of(_sum_key(pair)))
