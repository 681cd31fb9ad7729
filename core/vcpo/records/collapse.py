"""Whether a recorded run collapsed, and what to do about it, as messages for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vcpo.algo.health.collapse import Collapse, find_collapse, share_error
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.journal import EvaluationRecord, Metrics
from vcpo.records.no_update import never_updated_notice
from vcpo.records.step_record import StepRecord

_CURE = (
    "Cure: a smaller optimizer.learningRate or algorithm.maxPolicyLagSteps, from a checkpoint"
    " before the collapse"
)


class Measure(StrEnum):
    """What collapsed."""

    ACCURACY = "accuracy on held-out prompts"
    REWARD = "mean training reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCollapse:
    """The collapse of a run."""

    measure: Measure
    fall: Collapse
    warned_step: int | None
    """First step at which the early warning was critical or dead; None when it never was."""


def run_collapse(metrics: Metrics) -> RunCollapse | None:
    """Return the collapse of a run, or None; one that lasts comes before one that was overcome."""
    found = (
        (Measure.ACCURACY, _accuracy_collapse(metrics.evaluations)),
        (Measure.REWARD, _reward_collapse(metrics.steps)),
    )
    falls = [(measure, fall) for measure, fall in found if fall is not None]
    if not falls:
        return None
    measure, fall = min(falls, key=lambda each: (each[1].has_recovered, each[1].step))
    warned = next((step.step for step in metrics.steps if is_critical(step)), None)
    return RunCollapse(measure=measure, fall=fall, warned_step=warned)


def is_critical(step: StepRecord) -> bool:
    """Return whether the early warning is critical or dead after a step."""
    return step.warning_level in (WarningLevel.CRITICAL, WarningLevel.DEAD)


def collapse_notice(metrics: Metrics) -> str | None:
    """Return a notice about the collapse of a run; None when it did not collapse."""
    found = run_collapse(metrics)
    if found is None:
        return None
    fall = found.fall
    before = f"{fall.best:.3g} at step {fall.best_step:,}"
    fell = f"{fall.value:.3g} at step {fall.step:,}"
    if found.warned_step is None:
        warned = "The early warning never was critical"
    else:
        warned = f"The early warning was critical from step {found.warned_step:,}"
    if fall.has_recovered:
        return (
            f"The {found.measure} collapsed from {before} to {fell}, and recovered: it ends at"
            f" {fall.last:.3g}. {warned}."
        )
    return (
        f"The run collapsed: the {found.measure} fell from {before} to {fell}, and ends at"
        f" {fall.last:.3g}. {warned}. {_CURE}."
    )


def lasting_collapse_notice(metrics: Metrics) -> str | None:
    """Return a notice about a collapse from which the run did not recover, else None.

    A model that no step changed has not collapsed: its rewards move by chance.
    """
    found = run_collapse(metrics)
    if found is None or found.fall.has_recovered or never_updated_notice(metrics.steps):
        return None
    return collapse_notice(metrics)


def critical_at_end_notice(steps: Sequence[StepRecord]) -> str | None:
    """Return a notice if the early warning is critical or dead after the last step, else None."""
    if not steps or not is_critical(steps[-1]):
        return None
    last = steps[-1]
    first = next(step.step for step in steps if is_critical(step))
    return (
        f"The early warning is {last.warning_level} at the last step (score"
        f" {last.warning_score:.2f}); it was first critical at step {first:,}."
    )


def _accuracy_collapse(evaluations: Sequence[EvaluationRecord]) -> Collapse | None:
    values = [(each.step, each.accuracy) for each in evaluations]
    num_rewards = max(1, min((each.num_trajectories for each in evaluations), default=1))
    return find_collapse(values, errors=[share_error(one, num_rewards) for _, one in values])


def _reward_collapse(steps: Sequence[StepRecord]) -> Collapse | None:
    """Judge the windows of steps as the learner's guards did, under the step that ends each."""
    found = [
        (step.step, step.reward_window_mean, step.reward_window_error)
        for step in steps
        if step.reward_window_mean is not None
    ]
    return find_collapse(
        [(step, mean) for step, mean, _ in found], errors=[error for _, _, error in found]
    )
