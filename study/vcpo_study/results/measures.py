"""Measures of one finished cell: final accuracy, speed of learning, collapse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Final

from vcpo.algo import find_collapse
from vcpo_study.cells.records import EvaluationRow

FINAL_EVALUATIONS: Final = 3
"""The final accuracy is the mean of so many last evaluations."""


def final_accuracy(evaluations: Sequence[EvaluationRow]) -> float:
    """Return the mean accuracy of the last evaluations.

    Raises: ValueError when there is no evaluation.
    """
    if not evaluations:
        raise ValueError("evaluations is empty: at least one is needed")
    return fmean(each.accuracy for each in evaluations[-FINAL_EVALUATIONS:])


def steps_to(evaluations: Sequence[EvaluationRow], target: float) -> float | None:
    """Return the steps until the accuracy first reaches a target; None when it never does.

    The accuracy is interpolated linearly between evaluations.
    """
    if evaluations and evaluations[0].accuracy >= target:
        return float(evaluations[0].step)
    for before, after in pairwise(evaluations):
        if after.accuracy >= target:
            share = (target - before.accuracy) / (after.accuracy - before.accuracy)
            return before.step + share * (after.step - before.step)
    return None


def collapse_step(evaluations: Sequence[EvaluationRow]) -> int | None:
    """Return the step of the first evaluation below half of the best one before it, or None."""
    collapse = find_collapse([(each.step, each.accuracy) for each in evaluations])
    return None if collapse is None else collapse.step


def deepest_fall(evaluations: Sequence[EvaluationRow]) -> tuple[float, int]:
    """Return the largest fall below an earlier evaluation, and the step at its bottom."""
    best = accumulate((each.accuracy for each in evaluations), max)
    pairs = zip(evaluations, best, strict=True)
    falls = [(highest - each.accuracy, each.step) for each, highest in pairs]
    return max(falls, key=lambda fall: fall[0])
