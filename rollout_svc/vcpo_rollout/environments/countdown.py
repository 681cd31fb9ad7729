"""Countdown: reach a target with given numbers, each used exactly once.

Source: the reward of mit-han-lab/vcpo, `verl/utils/reward_score/countdown.py`. Departures, so that
every judgement is safe and exact (`arithmetic.py`): powers, `//` and decimals score 0; values are
fractions compared exactly; 0 is a valid target.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from vcpo_rollout.environments.answers import extract_answer
from vcpo_rollout.environments.arithmetic import calculate
from vcpo_rollout.environments.draws import MAX_PROPOSALS, draw_item
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.environments.parameters import Style, parse_span, parse_style

MAX_NUMBERS: Final = 8
MAX_VALUE: Final = 1_000_000

# Draws when a task is made: settings without solvable puzzles fail before a run starts.
_TRIAL_DRAWS: Final = 3
_TRIAL_PROPOSALS: Final = 5_000

_INSTRUCT_TEXT: Final = (
    "Using the numbers {numbers}, write an arithmetic expression that equals {target}. "
    "Use every number exactly once, the operations + - * / and parentheses only. "
    "Think step by step, then give the expression alone, without an equals sign, "
    "in <answer> tags, for example <answer>(1 + 2) * 3</answer>."
)
_PLAIN_TEXT: Final = "{target} from {numbers}: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """Numbers, a target, and a proof that the target can be reached."""

    numbers: tuple[int, ...]
    target: int
    solution: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown:
    """The Countdown task; its reward is 1.0 for a right expression and 0.0 otherwise."""

    seed: int
    numbers: tuple[int, int] = (3, 4)
    """Fewest and most given numbers."""
    values: tuple[int, int] = (1, 20)
    targets: tuple[int, int] = (1, 100)
    operators: str = "+-*/"
    """Operators in the generated solutions. A response may always use all four."""
    style: Style = Style.INSTRUCT
    marked_answer = staticmethod(extract_answer)

    def __post_init__(self) -> None:
        checked = {
            "numbers": parse_span("numbers", self.numbers, lowest=2, highest=MAX_NUMBERS),
            "values": parse_span("values", self.values, lowest=1, highest=MAX_VALUE),
            "targets": parse_span("targets", self.targets, lowest=0, highest=MAX_VALUE),
            "operators": _parse_operators(self.operators),
            "style": parse_style(self.style),
        }
        for field, value in checked.items():
            object.__setattr__(self, field, value)
        for split in Split:
            for index in range(_TRIAL_DRAWS):
                self._puzzle(split, index, max_proposals=_TRIAL_PROPOSALS)

    def prompt(self, split: Split, index: int) -> Prompt:
        puzzle = self._puzzle(split, index)
        wording = _INSTRUCT_TEXT if self.style is Style.INSTRUCT else _PLAIN_TEXT
        separator = ", " if self.style is Style.INSTRUCT else " "
        shown = separator.join(map(str, puzzle.numbers))
        return Prompt(
            text=wording.format(numbers=shown, target=puzzle.target),
            answer=puzzle.solution,
            metadata={"numbers": puzzle.numbers, "target": puzzle.target},
        )

    def reward(self, prompt: Prompt, response: str) -> float:
        puzzle = prompt.metadata
        expression = extract_answer(response)
        calculation = None if expression is None else calculate(expression)
        if calculation is None or sorted(calculation.numbers) != sorted(puzzle["numbers"]):
            return 0.0
        return 1.0 if calculation.value == puzzle["target"] else 0.0

    def _puzzle(self, split: Split, index: int, max_proposals: int = MAX_PROPOSALS) -> Puzzle:
        return draw_item(
            seed=self.seed,
            split=split,
            index=index,
            propose=self._propose,
            key=lambda each: json.dumps(["countdown", sorted(each.numbers), each.target]),
            max_proposals=max_proposals,
        )

    def _propose(self, random: Random) -> Puzzle | None:
        """Combine random numbers into one value; return None unless it is an allowed target."""
        count = random.randint(*self.numbers)
        numbers = tuple(random.randint(*self.values) for _ in range(count))
        result = _combine_all(numbers, self.operators, random)
        if result is None or not self.targets[0] <= result.value <= self.targets[1]:
            return None
        return Puzzle(numbers=numbers, target=result.value, solution=result.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """A part of a solution: its text, its value (>= 0), and its operator's precedence."""

    text: str
    value: int
    precedence: int


_SUM, _PRODUCT, _NUMBER = 1, 2, 3


def _combine_all(numbers: tuple[int, ...], operators: str, random: Random) -> _Term | None:
    """Combine random pairs by random operators until one term is left; None if one fails."""
    terms = [_Term(text=str(number), value=number, precedence=_NUMBER) for number in numbers]
    while len(terms) > 1:
        random.shuffle(terms)
        combined = _combine(terms.pop(), terms.pop(), random.choice(operators))
        if combined is None:
            return None
        terms.append(combined)
    return terms[0]


def _combine(left: _Term, right: _Term, operator: str) -> _Term | None:
    """Return `left operator right`, or None if that is negative or not an integer."""
    value = _APPLY[operator](left.value, right.value)
    if value is None:
        return None
    precedence = _SUM if operator in "+-" else _PRODUCT
    # a-(b+c) and a/(b*c) need their parentheses, a+(b-c) and a*(b/c) do not.
    right_precedence = precedence + 1 if operator in "-/" else precedence
    text = f"{_parenthesize(left, precedence)}{operator}{_parenthesize(right, right_precedence)}"
    return _Term(text=text, value=value, precedence=precedence)


def _parenthesize(term: _Term, precedence: int) -> str:
    return f"({term.text})" if term.precedence < precedence else term.text


_APPLY: Final[Mapping[str, Callable[[int, int], int | None]]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right if left >= right else None,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right if right != 0 and left % right == 0 else None,
}


def _parse_operators(value: object) -> str:
    if not isinstance(value, str) or not value or not set(value) <= set(_APPLY):
        fix = "is not a choice of operators; write some of + - * / as one text, such as '+-*'"
        raise ValueError(f"environment.parameters.operators: {value!r} {fix}")
    return value
