"""Generated tasks of the library reasoning-gym: algebra, games, graphs, logic and others.

A run names a data set of the library, `reasoning_gym:DATASET`. Item i is a function of the run's
seed and i. Source: Stojanovski et al. 2025, arXiv 2505.24760. The library's own scorers judge, in
another process (`judge_process`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from vcpo_rollout.environments.child_judge import ChildJudge
from vcpo_rollout.environments.draws import draw_item
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.environments.parameters import Style, parse_style
from vcpo_rollout.environments.reasoning_gym.dataset import GeneratedItems, question_sum
from vcpo_rollout.environments.reasoning_gym.judge_process import LIMIT_S

_MODULE: Final = "vcpo_rollout.environments.reasoning_gym.judge_process"
_INSTRUCTION: Final = "Give the final answer alone in <answer> tags."
_START, _END = "<answer>", "</answer>"
_MAX_CHARACTERS: Final = 16_384
"""Longest answer that is scored; a longer one gets 0."""
_SLACK_S: Final = 5.0
"""Time that the judge has beyond that of its fork."""


class ReasoningGym:
    """One data set of the library; the reward is its score, mostly in [0, 1].

    dataset: its name in the library.
    config: fields of its configuration, without `seed`; `size` is the number of items.
    style: `instruct` asks for the answer in tags; `plain` is the question alone, and the whole
        response its answer unless it has tags.

    Raises: ValueError, naming the parameter, for an unknown data set or setting.
    """

    def __init__(
        self,
        *,
        seed: int,
        dataset: str,
        config: Mapping[str, Any] | None = None,
        style: Style = Style.INSTRUCT,
    ) -> None:
        self._name = dataset
        self._seed = seed
        self._style = parse_style(style)
        self._items = GeneratedItems(dataset, config or {}, seed)
        self._judge = ChildJudge(
            _MODULE,
            (dataset, json.dumps(dict(config or {})), str(seed)),
            limit_s=LIMIT_S + _SLACK_S,
            first={},
            cure="install the library in the rollout image: pip install 'vcpo[reasoning-gym]'",
        )

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a question; its metadata is the item's index and checksum."""
        number, item = draw_item(
            seed=self._seed,
            split=split,
            index=index,
            propose=self._propose,
            key=lambda proposed: f"{self._name}/{proposed[1]['question']}",
        )
        text = item["question"].strip()
        if self._style is Style.INSTRUCT:
            text = f"{text}\n\n{_INSTRUCTION}"
        return Prompt(text=text, metadata={"index": number, "sum": question_sum(item)})

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return the score of the text in the last tags, or of the plain response; else 0.0.

        Raises: RuntimeError when the judge cannot make the same item.
        """
        answer = self._answer(response)
        if not answer or len(answer) > _MAX_CHARACTERS:
            return 0.0
        verdict = self._judge.ask({**prompt.metadata, "answer": answer})
        if verdict is not None and "differs" in verdict:
            raise RuntimeError(
                f"data set {self._name!r} has other items in another process, so no answer can be"
                " scored and no two workers would agree; use another one"
            )
        return 0.0 if verdict is None else float(verdict["score"])

    def _propose(self, random: Random) -> tuple[int, dict[str, Any]]:
        number = random.randrange(self._items.size)
        return number, self._items.at(number)

    def _answer(self, response: str) -> str:
        marked, end, _ = response.rpartition(_END)
        if end and _START in marked:
            return marked.rpartition(_START)[2].strip()
        return response.strip() if self._style is Style.PLAIN else ""
