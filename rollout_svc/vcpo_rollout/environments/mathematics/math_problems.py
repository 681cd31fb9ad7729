r"""MATH: competition problems whose solution marks the answer with a box.

Source: Hendrycks et al. 2021, arXiv 2103.03874: the answer is what stands in the last `\boxed{}` of
the solution. Departure: expressions are compared by their meaning (math-verify), not as strings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vcpo_rollout.environments.answers import extract_boxed
from vcpo_rollout.environments.data_sets import DataSet, Questions, load_questions
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.environments.mathematics.judge import MathJudge
from vcpo_rollout.environments.parameters import Style, parse_path, parse_style

_DATA_SET: Final = DataSet(
    hub_name="DigitalLearningGmbH/MATH-lighteval",
    hub_config="default",
    columns=("problem", "solution"),
)
_INSTRUCT_TEXT: Final = "{problem}\n\nThink step by step, then give the answer in \\boxed{{}}."


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblems:
    r"""The MATH task; its reward is 1.0 for a boxed answer of the same meaning and 0.0 otherwise.

    Raises ValueError, naming parameter, row and column, for a data set that is not as it must be.
    """

    seed: int
    """Chooses the order of the problems."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file, or a folder of them; None is the hub."""

    style: Style = Style.INSTRUCT
    """How the prompt is worded; `plain` is the problem alone."""

    _questions: Questions = field(init=False, repr=False, compare=False)
    _judge: MathJudge = field(init=False, repr=False, compare=False, default_factory=MathJudge)

    def __post_init__(self) -> None:
        object.__setattr__(self, "style", parse_style(self.style))
        path = parse_path(self.path)
        questions = load_questions(_DATA_SET, path, self._made, seed=self.seed)
        object.__setattr__(self, "_questions", questions)

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a problem; its answer is what the solution boxes."""
        return self._questions.at(split, index)

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return 1.0 if the last box of the response means the same as the answer, else 0.0."""
        found = extract_boxed(response)
        return 0.0 if found is None else float(self._judge.is_equal(prompt.answer, found))

    def _made(self, row: Mapping[str, Any]) -> Prompt | None:
        answer = extract_boxed(row["solution"])
        if not answer:
            return None
        wording = _INSTRUCT_TEXT if self.style is Style.INSTRUCT else "{problem}"
        return Prompt(text=wording.format(problem=row["problem"].strip()), answer=answer)
