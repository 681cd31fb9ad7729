"""Which checkpoint is the best one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from vcpo.records.journal import EvaluationRecord


def best_evaluated_step(
    evaluations: Iterable[EvaluationRecord], steps: Collection[int]
) -> int | None:
    """Return the step among `steps` with the best accuracy, the latest of equal ones.

    Returns None if none of them was evaluated.
    """
    evaluated = [each for each in evaluations if each.step in steps]
    best = max(evaluated, key=lambda each: (each.accuracy, each.step), default=None)
    return None if best is None else best.step
