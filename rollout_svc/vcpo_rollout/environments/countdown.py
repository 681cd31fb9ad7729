"""Countdown: reach a target with some given numbers, each used exactly once.

Source: the reward of mit-han-lab/vcpo, `verl/utils/reward_score/countdown.py`; the answer's place,
the once-each rule and the absence of shaping are kept. Departures, so that every response has a
safe and exact judgement (`arithmetic.py`): powers and `//` score 0; decimals score 0 rather than
being read as two integers; values are fractions and equality is exact, as the reference's 1e-5
only made room for floating point; a target of 0 is a target.
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
"""Most numbers in a puzzle; more has no use and makes a proof of solvability long."""

MAX_VALUE: Final = 1_000_000
"""Largest number or target."""

# Tried when a task is made, so that settings that nothing fits fail before a run begins. Far fewer
# proposals than a lease may take: settings that pass here do not run dry later.
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
    """Numbers, a target, and the proof that it can be reached."""

    numbers: tuple[int, ...]
    """The given numbers in the order in which they are shown; a number may occur twice."""

    target: int
    """What the expression must come to."""

    solution: str
    """One expression that does."""

    @property
    def key(self) -> str:
        """What makes two puzzles the same: the numbers, in whatever order, and the target."""
        return json.dumps(["countdown", sorted(self.numbers), self.target])


@dataclass(frozen=True, slots=True, kw_only=True)
class Countdown:
    """The Countdown task; its reward is 1.0 for a right expression and 0.0 otherwise.

    Raises ValueError, naming the parameter, for a setting out of bounds and for settings that
    hardly any solvable puzzle fits.
    """

    seed: int
    """Chooses which puzzles stand behind which indices."""

    numbers: tuple[int, int] = (3, 4)
    """Fewest and most numbers given, 2 to 8. Three suit a small model; the task grows hard at 5."""

    values: tuple[int, int] = (1, 20)
    """Smallest and largest given number, 1 to 1,000,000."""

    targets: tuple[int, int] = (1, 100)
    """Smallest and largest target, 0 to 1,000,000."""

    operators: str = "+-*/"
    """Operators that puzzles are made with. A response may use all four whatever is set here."""

    style: Style = Style.INSTRUCT
    """How the prompt is worded."""

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
        """Return a puzzle that can be solved; its answer is JSON with a solution as the proof."""
        puzzle = self._puzzle(split, index)
        wording = _INSTRUCT_TEXT if self.style is Style.INSTRUCT else _PLAIN_TEXT
        separator = ", " if self.style is Style.INSTRUCT else " "
        shown = separator.join(map(str, puzzle.numbers))
        answer = {
            "numbers": puzzle.numbers,
            "target": puzzle.target,
            "solution": puzzle.solution,
        }
        return Prompt(
            text=wording.format(numbers=shown, target=puzzle.target),
            answer=json.dumps(answer),
        )

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return 1.0 if the marked answer uses each number once and hits the target, else 0.0."""
        puzzle = json.loads(prompt.answer)
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
            key=lambda puzzle: puzzle.key,
            max_proposals=max_proposals,
        )

    def _propose(self, random: Random) -> Puzzle | None:
        """Combine random numbers down to one value, and keep it if it is a wanted target."""
        count = random.randint(*self.numbers)
        numbers = tuple(random.randint(*self.values) for _ in range(count))
        result = _combine_all(numbers, self.operators, random)
        if result is None or not self.targets[0] <= result.value <= self.targets[1]:
            return None
        return Puzzle(numbers=numbers, target=result.value, solution=result.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """A part of a solution: its text, its value (>= 0), and how tightly its operator binds."""

    text: str
    value: int
    binding: int


_SUM, _PRODUCT, _NUMBER = 1, 2, 3


def _combine_all(numbers: tuple[int, ...], operators: str, random: Random) -> _Term | None:
    """Join random pairs by random operators until one term is left; None if a join fails."""
    terms = [_Term(text=str(number), value=number, binding=_NUMBER) for number in numbers]
    while len(terms) > 1:
        random.shuffle(terms)
        joined = _combine(terms.pop(), terms.pop(), random.choice(operators))
        if joined is None:
            return None
        terms.append(joined)
    return terms[0]


def _combine(left: _Term, right: _Term, operator: str) -> _Term | None:
    """Return `left operator right`, or None where that is negative or not an integer."""
    value = _APPLY[operator](left.value, right.value)
    if value is None:
        return None
    binding = _SUM if operator in "+-" else _PRODUCT
    # a-(b+c) and a/(b*c) need their parentheses, a+(b-c) and a*(b/c) do not.
    binding_on_right = binding + 1 if operator in "-/" else binding
    text = f"{_bracketed(left, binding)}{operator}{_bracketed(right, binding_on_right)}"
    return _Term(text=text, value=value, binding=binding)


def _bracketed(term: _Term, binding: int) -> str:
    return f"({term.text})" if term.binding < binding else term.text


def _difference(left: int, right: int) -> int | None:
    return left - right if left >= right else None


def _quotient(left: int, right: int) -> int | None:
    return left // right if right != 0 and left % right == 0 else None


_APPLY: Final[Mapping[str, Callable[[int, int], int | None]]] = {
    "+": lambda left, right: left + right,
    "-": _difference,
    "*": lambda left, right: left * right,
    "/": _quotient,
}


def _parse_operators(value: object) -> str:
    if not isinstance(value, str) or not value or not set(value) <= set(_APPLY):
        raise ValueError(
            f"environment.parameters.operators: {value!r} is not a choice of operators; "
            "write some of + - * / as one text, such as '+-*'"
        )
    return value
