"""Held-out prompts with the answers of a run's first and last evaluation, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vcpo.records.journal import Metrics, ShownAnswer

_PROMPT_CHARACTERS: Final = 72
_RESPONSE_CHARACTERS: Final = 60


def answer_lines(metrics: Metrics) -> Iterator[str]:
    """Yield a line for each prompt that both evaluations show, and one for each of its answers."""
    evaluations = metrics.evaluations
    if len(evaluations) < 2:
        return
    after = {each.prompt: each for each in evaluations[-1].answers}
    for before in evaluations[0].answers:
        if before.prompt in after:
            yield f"...{_one_line(before.prompt)[-_PROMPT_CHARACTERS:]}"
            yield f"    before  {_shown(before)}"
            yield f"    after   {_shown(after[before.prompt])}"


def _shown(answer: ShownAnswer) -> str:
    return f"{_one_line(answer.response)[:_RESPONSE_CHARACTERS]}  (reward {answer.reward:g})"


def _one_line(text: str) -> str:
    """Return a text on one line; a terminal obeys none of its characters."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
