"""Measures of one finished cell: final accuracy, speed of learning, collapse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from research.cells.records import EvaluationRow
from vcpo.algo.health.collapse import find_collapse

FINAL_SHARE: Final = 0.25
"""The final accuracy is the mean of the evaluations in so large a last part of the steps."""
COLLAPSED_SHARE: Final = 0.5
"""A cell that ends below this share of the target has collapsed, whatever came before."""


def final_accuracy(evaluations: Sequence[EvaluationRow]) -> float:
    """Return the mean accuracy over the last quarter of a cell's steps; at least one evaluation."""
    last = evaluations[-1].step
    start = (1.0 - FINAL_SHARE) * last
    return fmean(each.accuracy for each in evaluations if each.step > start or each.step == last)


def steps_to(evaluations: Sequence[EvaluationRow], target: float) -> float:
    """Return the steps until the accuracy first reaches a target; infinite if it never does.

    The accuracy is interpolated linearly between evaluations.
    """
    if evaluations and evaluations[0].accuracy >= target:
        return float(evaluations[0].step)
    for before, after in pairwise(evaluations):
        if after.accuracy >= target:
            share = (target - before.accuracy) / (after.accuracy - before.accuracy)
            return before.step + share * (after.step - before.step)
    return float("inf")


def collapse_step(evaluations: Sequence[EvaluationRow]) -> int | None:
    """Return the step of the first evaluation below half of the best one before it, or None."""
    collapse = find_collapse([(each.step, each.accuracy) for each in evaluations])
    return None if collapse is None else collapse.step


def has_collapsed(evaluations: Sequence[EvaluationRow], target: float) -> bool:
    """Return whether a cell fell below half of its best, or ends below half of the target."""
    ends_low = final_accuracy(evaluations) < COLLAPSED_SHARE * target
    return ends_low or collapse_step(evaluations) is not None
