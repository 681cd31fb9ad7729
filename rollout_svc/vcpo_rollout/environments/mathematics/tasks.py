r"""GSM8K and MATH: questions from a data set, with answers that are mathematical expressions.

GSM8K: grade-school word problems whose answer is a number. Source: Cobbe et al. 2021, arXiv
2110.14168, and `grade_school_math/dataset.py` of its repository: a solution ends in `#### 42`, and
commas in the number are ignored. The same mark is looked for in the response. Departure: a box or
answer tags count too, since instruct models use them.

MATH: competition problems. Source: Hendrycks et al. 2021, arXiv 2103.03874: the answer is the last
`\boxed{}` of the solution. Departure: expressions are compared by meaning (math-verify), not as
strings.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from vcpo_rollout.environments.answers import extract_answer, extract_boxed
from vcpo_rollout.environments.data_sets import DataSet, Questions, load_questions
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.environments.mathematics.judge import MathJudge
from vcpo_rollout.environments.parameters import Style, parse_path, parse_style

_MARKED_NUMBER: Final = re.compile(r"#### *\$?(-?[0-9.,]+)")


def _marked_number(text: str) -> str | None:
    marked = _MARKED_NUMBER.findall(text)
    number = str(marked[-1]).replace(",", "").rstrip(".") if marked else ""
    return number or None


def _number_in_response(response: str) -> str | None:
    found = _marked_number(response) or extract_answer(response)
    return None if found is None else found.lstrip("$").replace(",", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """What distinguishes one task from another."""

    data_set: DataSet
    """Its columns are the question, and the solution that ends in the answer."""
    instruction: str
    """Follows the question, except in the plain style."""
    reference: Callable[[str], str | None]
    """Extracts the answer from a solution."""
    candidate: Callable[[str], str | None]
    """Extracts the model's answer from a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MathTask:
    """A task over a data set; its reward is 1.0 for an answer of the same meaning, else 0.0.

    Raises ValueError, naming parameter, row and column, for a data set that is malformed.
    """

    seed: int
    """Chooses the order of the questions."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file, or a folder of them; None loads it from the hub."""

    style: Style = Style.INSTRUCT
    """The wording of the prompt; `plain` is the question alone."""

    _questions: Questions = field(init=False, repr=False, compare=False)
    _judge: MathJudge = field(init=False, repr=False, compare=False, default_factory=MathJudge)
    _description: ClassVar[_Description]

    def __post_init__(self) -> None:
        object.__setattr__(self, "style", parse_style(self.style))
        path, data_set = parse_path(self.path), self._description.data_set
        questions = load_questions(data_set, path, self._make_prompt, seed=self.seed)
        object.__setattr__(self, "_questions", questions)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._questions.at(split, index)

    def reward(self, prompt: Prompt, response: str) -> float:
        candidate = self._description.candidate(response)
        if candidate is None:
            return 0.0
        return float(self._judge.is_equal(prompt.answer, candidate))

    def _make_prompt(self, row: Mapping[str, Any]) -> Prompt | None:
        question, solution = (row[column] for column in self._description.data_set.columns)
        reference = self._description.reference(solution)
        if not reference:
            return None
        text = question.strip()
        if self.style is Style.INSTRUCT:
            text = f"{text}\n\n{self._description.instruction}"
        return Prompt(text=text, answer=reference)


class Gsm8k(_MathTask):
    """The GSM8K task; a response marks its answer with ####, a box or answer tags."""

    _description = _Description(
        data_set=DataSet(
            hub_name="openai/gsm8k", hub_config="main", columns=("question", "answer")
        ),
        instruction="Think step by step, then give the number alone on the last line, after ####.",
        reference=_marked_number,
        candidate=_number_in_response,
    )


class MathProblems(_MathTask):
    r"""The MATH task; a response marks its answer with `\boxed{}`."""

    _description = _Description(
        data_set=DataSet(
            hub_name="DigitalLearningGmbH/MATH-lighteval",
            hub_config="default",
            columns=("problem", "solution"),
        ),
        instruction="Think step by step, then give the answer in \\boxed{}.",
        reference=extract_boxed,
        candidate=extract_boxed,
    )
