"""Measures of one finished cell: final accuracy, speed of learning, collapse, early warning."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from research.cells.records import EvaluationRow, StepColumns
from vcpo.algo.health.collapse import find_collapse
from vcpo.algo.health.early_warning import EarlyWarning, StepHealth, WarningLevel

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


def first_alarm(steps: StepColumns, level: WarningLevel) -> int | None:
    """Return the first step of a cell with a warning of this level or a worse one, or None.

    The warning is the learner's own, so that other thresholds can be judged without running a cell.
    """
    warning = EarlyWarning()
    columns = steps.ess_ratio, steps.on_policy_ess_ratio, steps.ess, steps.gradient_norm
    for step, (ratio, on_policy, ess, norm) in enumerate(zip(*columns, strict=True), start=1):
        health = StepHealth(relative_ess=ratio / on_policy, ess=ess, gradient_norm=norm or None)
        warning = warning.observe(health)
        if warning.level.is_at_least(level):
            return step
    return None
