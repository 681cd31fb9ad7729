r"""GSM8K and MATH: questions from a data set, with answers that are mathematical expressions.

GSM8K: grade-school word problems whose answer is a number. Source: Cobbe et al. 2021, arXiv
2110.14168, and `grade_school_math/dataset.py` of its repository: a solution ends in `#### 42`, and
commas in the number are ignored. The same mark is looked for in the response. Departure: a box or
answer tags count too, since instruct models use them.

MATH: competition problems. Source: Hendrycks et al. 2021, arXiv 2103.03874: the answer is the last
`\boxed{}` of the solution. Departures: expressions are compared by meaning (math-verify), not as
strings; answer tags count too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from vcpo_rollout.environments.answers import extract_answer, extract_boxed, said
from vcpo_rollout.environments.data_sets import DataSet, Questions, load_questions
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.environments.mathematics.judge import MathJudge
from vcpo_rollout.environments.parameters import Style, parse_path, parse_style

_MARKED_NUMBER: Final = re.compile(r"####[ *$]*(-?)\$?([0-9.,]+)")


def _marked_number(text: str) -> str | None:
    marked = _MARKED_NUMBER.findall(text)
    sign, number = marked[-1] if marked else ("", "")
    number = number.replace(",", "").rstrip(".")
    return f"{sign}{number}" if number else None


def _number_in_response(response: str) -> str | None:
    found = _marked_number(said(response)) or extract_answer(response)
    return None if found is None else found.lstrip("$").replace(",", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _MathTask:
    """A task over a data set; its reward is 1.0 for an answer of the same meaning, else 0.0.

    Raises ValueError, naming parameter, row and column, for a data set that is malformed.
    """

    seed: int
    path: str | None = None
    style: Style = Style.INSTRUCT
    _questions: Questions = field(init=False, repr=False, compare=False)
    _judge: MathJudge = field(init=False, repr=False, compare=False, default_factory=MathJudge)
    _data_set: ClassVar[DataSet]
    _instruction: ClassVar[str]
    """Follows the question, except in the plain style."""
    _reference: ClassVar["staticmethod[[str], str | None]"]
    marked_answer: ClassVar["staticmethod[[str], str | None]"]
    """Extract the answer from a solution, and from a response."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "style", parse_style(self.style))
        path = parse_path(self.path)
        questions = load_questions(self._data_set, path, self._make_prompt, seed=self.seed)
        object.__setattr__(self, "_questions", questions)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._questions.at(split, index)

    def reward(self, prompt: Prompt, response: str) -> float:
        candidate = self.marked_answer(response)
        return float(candidate is not None and self._judge.is_equal(prompt.answer, candidate))

    def _make_prompt(self, row: Mapping[str, Any]) -> Prompt | None:
        question, solution = (row[column] for column in self._data_set.columns)
        reference = self._reference(solution)
        if not reference:
            return None
        text = question.strip()
        if self.style is Style.INSTRUCT:
            text = f"{text}\n\n{self._instruction}"
        return Prompt(text=text, answer=reference)


class Gsm8k(_MathTask):
    """The GSM8K task; a response marks its answer with ####, a box or answer tags."""

    _data_set = DataSet(hub_name="openai/gsm8k", hub_config="main", columns=("question", "answer"))
    _instruction = "Think step by step, then give the number alone on the last line, after ####."
    _reference = staticmethod(_marked_number)
    marked_answer = staticmethod(_number_in_response)


class MathProblems(_MathTask):
    r"""The MATH task; a response marks its answer with `\boxed{}` or answer tags."""

    _data_set = DataSet(
        hub_name="DigitalLearningGmbH/MATH-lighteval",
        hub_config="default",
        columns=("problem", "solution"),
    )
    _instruction = "Think step by step, then give the answer in \\boxed{}."
    _reference = staticmethod(extract_boxed)
    marked_answer = staticmethod(extract_answer)
