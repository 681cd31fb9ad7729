"""Formulas with a calculator: a small task of two turns, whose tool runs in the worker's process.

A model replaces the letters of a formula by their numbers, reads the value that comes back, and
gives it as its answer. The calculator is `arithmetic.calculate`: it runs no program, so it needs
no sandbox, and it takes microseconds.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Final

from vcpo_rollout.environments.answers import extract_answer
from vcpo_rollout.environments.arithmetic import calculate
from vcpo_rollout.environments.draws import draw_item
from vcpo_rollout.environments.environment import Conversation, Prompt, Split
from vcpo_rollout.environments.parameters import Style, parse_integer, parse_span, parse_style

_LETTERS: Final = "abcdefgh"
_OPERATORS: Final = "+-*"
_NO_VALUE: Final = "?"
_INSTRUCT_TEXT: Final = (
    "{numbers}. What is {formula}? You may use a calculator up to {calls} times: end your turn "
    "with a line that has only numbers, the operators + - * / and parentheses, and its value comes "
    "back, or =? if the line is none. A calculator knows no letters. "
    "Give the number alone in <answer> tags, for example <answer>42</answer>."
)
_PLAIN_TEXT: Final = "{numbers} {formula}: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A formula, and the numbers that its letters stand for."""

    numbers: tuple[int, ...]
    """The number of each letter, from `a`."""

    formula: str
    """Letters and + - *, without spaces."""

    @property
    def expression(self) -> str:
        return "".join(
            str(self.numbers[_LETTERS.index(each)]) if each in _LETTERS else each
            for each in self.formula
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calculator:
    """The task; its reward is 1.0 for the right number in the last turn and 0.0 otherwise.

    Raises ValueError, naming the parameter, when a setting is out of bounds.
    """

    seed: int
    """Decides which question each index has."""

    letters: int = 3
    """Letters with a number, 2 to 8."""

    terms: tuple[int, int] = (4, 6)
    """Fewest and most terms of a formula, 2 to 16; a letter may occur several times."""

    values: tuple[int, int] = (1, 99)
    """Smallest and largest number of a letter, 1 to 1,000,000."""

    calls: int = 3
    """Largest number of calculations, 1 to 64; a further one ends the conversation."""

    style: Style = Style.INSTRUCT
    """The wording of the prompt."""

    def __post_init__(self) -> None:
        parse_integer("letters", self.letters, lowest=2, highest=len(_LETTERS))
        parse_integer("calls", self.calls, lowest=1, highest=64)
        checked = {
            "terms": parse_span("terms", self.terms, lowest=2, highest=16),
            "values": parse_span("values", self.values, lowest=1, highest=1_000_000),
            "style": parse_style(self.style),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def prompt(self, split: Split, index: int) -> Prompt:
        question = draw_item(
            seed=self.seed,
            split=split,
            index=index,
            propose=self._propose,
            key="calculator/{}".format,
        )
        calculation = calculate(question.expression)
        assert calculation is not None
        instruct = self.style is Style.INSTRUCT
        equals, separator = (" = ", ", ") if instruct else ("=", " ")
        numbers = separator.join(
            f"{letter}{equals}{number}"
            for letter, number in zip(_LETTERS, question.numbers, strict=False)
        )
        wording = _INSTRUCT_TEXT if instruct else _PLAIN_TEXT
        return Prompt(
            text=wording.format(numbers=numbers, formula=question.formula, calls=self.calls),
            answer=str(calculation.value),
            metadata={"expression": question.expression},
        )

    def reward(self, prompt: Prompt, response: str) -> float:
        return 1.0 if extract_answer(response) == prompt.answer else 0.0

    def converse(self, prompt: Prompt) -> Conversation:
        return _Exchange(task=self, prompt=prompt, calls_left=self.calls)

    def _propose(self, random: Random) -> Question:
        numbers = tuple(random.randint(*self.values) for _ in range(self.letters))
        terms = random.choices(_LETTERS[: self.letters], k=random.randint(*self.terms))
        operators = random.choices(_OPERATORS, k=len(terms) - 1)
        rest = "".join(operator + term for operator, term in zip(operators, terms[1:], strict=True))
        return Question(numbers=numbers, formula=terms[0] + rest)


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One conversation: the last line of each turn is calculated until a turn has an answer."""

    task: Calculator
    prompt: Prompt
    calls_left: int
    last_turn: str = field(default="", init=False)

    def next_turn(self, response: str) -> str | None:
        self.last_turn = response
        if self.calls_left == 0 or extract_answer(response) is not None:
            return None
        self.calls_left -= 1
        lines = response.strip().splitlines()
        calculation = calculate(lines[-1]) if lines else None
        return f"={_NO_VALUE if calculation is None else calculation.value}\n"

    def reward(self) -> float:
        return self.task.reward(self.prompt, self.last_turn)
