"""Demonstrations: what a warm start imitates, right or wrong as often as its recipe says."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from random import Random
from typing import Final, Protocol

from vcpo_rollout.environments import Environment, Prompt
from vcpo_rollout.environments.arithmetic import calculate
from vcpo_rollout.environments.environment import MultiTurnEnvironment

ANSWER_TAGS: Final = ("<answer>", "</answer>")

SHAPES: Final = (
    "{}+{}+{}",
    "{}+{}-{}",
    "{}-{}-{}",
    "{}*{}+{}",
    "{}*{}-{}",
    "{}-{}*{}",
    "({}+{})*{}",
    "({}-{})*{}",
    "{}*{}*{}",
)
"""Every value that three numbers and + - * can make, a negative one aside, has one of these."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a response."""

    text: str
    is_sampled: bool = True
    """Whether the model writes it and ends its turn there; other text is not learned."""


Parts = Sequence[Part]


class Demonstrate(Protocol):
    """Makes the response that a demonstration shows."""

    def __call__(
        self, environment: Environment, prompt: Prompt, *, error_rate: float, random: Random
    ) -> Parts:
        """Return a response; error_rate: in [0, 1], of a response or of a digit."""
        ...


def sort_or_shuffle(
    environment: Environment, prompt: Prompt, *, error_rate: float, random: Random
) -> Parts:
    """Return the sorted digits, or with `error_rate` the same digits in any other order."""
    correct = random.random() < 1.0 - error_rate
    digits = list(prompt.answer)
    while not correct and len(set(digits)) > 1 and "".join(digits) == prompt.answer:
        random.shuffle(digits)
    return [Part("".join(digits))]


def answer_with_slips(
    environment: Environment, prompt: Prompt, *, error_rate: float, random: Random
) -> Parts:
    """Return the answer; `error_rate` is that of each of its digits."""
    return [Part(with_slips(prompt.answer, error_rate, random))]


def countdown(
    environment: Environment, prompt: Prompt, *, error_rate: float, random: Random
) -> Parts:
    """Return a solution, or with `error_rate` some expression with the same numbers."""
    correct = random.random() < 1.0 - error_rate
    puzzle = prompt.metadata
    numbers = tuple(sorted(puzzle["numbers"], reverse=True))
    if correct:
        expression = simplest_solution(numbers, puzzle["target"])
    else:
        expression = random.choice(SHAPES).format(*random.sample(numbers, len(numbers)))
    return [Part(marked(expression))]


@cache
def simplest_solution(numbers: tuple[int, ...], target: int) -> str:
    """Return the first shape in `SHAPES`, with the larger numbers first, that hits the target.

    One fixed solution per puzzle is a function that a small model can learn; the environment's own
    solution is one of several at random. numbers: sorted, largest first.
    """
    for shape in SHAPES:
        for order in permutations(numbers):
            expression = shape.format(*order)
            calculation = calculate(expression)
            if calculation is not None and calculation.value == target:
                return expression
    raise ValueError(f"numbers: {numbers} cannot make the target {target} with + - *")


def calculator(
    environment: Environment, prompt: Prompt, *, error_rate: float, random: Random
) -> Parts:
    """Return a call, the calculator's reply and the answer; `error_rate` is that of each digit.

    The reply is the environment's own to the call as it was written, so an answer that copies it
    is wrong after a wrong call.
    """
    assert isinstance(environment, MultiTurnEnvironment)
    call = with_slips(prompt.metadata["expression"], error_rate, random)
    reply = environment.converse(prompt).next_turn(call)
    assert reply is not None
    answer = marked(with_slips(reply.strip("=\n"), error_rate, random))
    return [Part(call), Part(reply, is_sampled=False), Part(answer)]


def marked(answer: str) -> str:
    """Return an answer in its tags."""
    return f"{ANSWER_TAGS[0]}{answer}{ANSWER_TAGS[1]}"


def with_slips(text: str, rate: float, random: Random) -> str:
    """Return the text with each digit replaced, at a rate in [0, 1], by any other digit."""
    return "".join(
        random.choice("0123456789".replace(each, ""))
        if each.isdigit() and random.random() < rate
        else each
        for each in text
    )
