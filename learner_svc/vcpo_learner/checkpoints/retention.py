"""Which checkpoints stay on disk, and which one is the best."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def kept_steps(
    steps: Sequence[int], *, keep: int, good: Collection[int], good_age_steps: int
) -> set[int]:
    """Return the steps whose checkpoints stay: the newest ones, and those for a rollback.

    For a rollback there is the newest good one that is old enough, and the one that is the next to
    be. Where they are not among the newest ones, they take the places of the oldest of these, but
    never that of the very last.

    steps: in ascending order, at least one.
    keep: number of newest ones, at least 1.
    good: steps that a rollback may go back to when they are old enough; empty without rollbacks.
    good_age_steps: steps from a checkpoint to the newest one after which it is old enough.
    """
    newest = list(steps[-keep:])
    aged = max((step for step in good if step <= steps[-1] - good_age_steps), default=-1)
    next_aged = min((step for step in good if step > aged), default=-1)
    needed = {aged, next_aged} & set(steps)
    replaceable = [step for step in newest[:-1] if step not in needed]
    replaced = replaceable[: len(needed - set(newest))]
    return needed | set(newest) - set(replaced)


def best_evaluated_step(accuracies: Mapping[int, float], steps: Collection[int]) -> int | None:
    """Return the step among `steps` with the best accuracy, the latest of equal ones.

    accuracies: of evaluations, by the step at which each began.

    Returns None if none of the steps was evaluated.
    """
    evaluated = [step for step in accuracies if step in steps]
    return max(evaluated, key=lambda step: (accuracies[step], step), default=None)
