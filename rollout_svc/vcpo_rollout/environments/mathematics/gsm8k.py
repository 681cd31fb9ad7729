"""GSM8K: grade-school word problems whose answer is a number.

Source: Cobbe et al. 2021, arXiv 2110.14168, and `grade_school_math/dataset.py` of its repository: a
solution ends in `#### 42`, and commas in the number mean nothing. The response is judged by the
same mark; a box or tags are accepted too, as instruct models are used to them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vcpo_rollout.environments.answers import extract_answer
from vcpo_rollout.environments.data_sets import DataSet, Questions, load_questions
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.environments.mathematics.judge import MathJudge
from vcpo_rollout.environments.parameters import Style, parse_path, parse_style

_DATA_SET: Final = DataSet(
    hub_name="openai/gsm8k", hub_config="main", columns=("question", "answer")
)
_MARKED: Final = re.compile(r"#### *\$?(-?[0-9.,]+)")
_INSTRUCT_TEXT: Final = (
    "{question}\n\nThink step by step, then give the number alone on the last line, after ####."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8k:
    """The GSM8K task; its reward is 1.0 for the right number and 0.0 otherwise.

    Raises ValueError, naming parameter, row and column, for a data set that is not as it must be.
    """

    seed: int
    """Chooses the order of the questions."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file, or a folder of them; None is the hub."""

    style: Style = Style.INSTRUCT
    """How the prompt is worded; `plain` is the question alone."""

    _questions: Questions = field(init=False, repr=False, compare=False)
    _judge: MathJudge = field(init=False, repr=False, compare=False, default_factory=MathJudge)

    def __post_init__(self) -> None:
        object.__setattr__(self, "style", parse_style(self.style))
        path = parse_path(self.path)
        questions = load_questions(_DATA_SET, path, self._made, seed=self.seed)
        object.__setattr__(self, "_questions", questions)

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a question; its answer is the number without commas."""
        return self._questions.at(split, index)

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return 1.0 if the last marked number is the answer, else 0.0."""
        found = _number(response) or extract_answer(response)
        if found is None:
            return 0.0
        return float(self._judge.is_equal(prompt.answer, found.lstrip("$").replace(",", "")))

    def _made(self, row: Mapping[str, Any]) -> Prompt | None:
        answer = _number(row["answer"])
        if answer is None:
            return None
        wording = _INSTRUCT_TEXT if self.style is Style.INSTRUCT else "{question}"
        return Prompt(text=wording.format(question=row["question"].strip()), answer=answer)


def _number(text: str) -> str | None:
    """Return the last number marked by ####, without commas and a sentence's full stop."""
    marked = _MARKED.findall(text)
    number = str(marked[-1]).replace(",", "").rstrip(".") if marked else ""
    return number or None
