"""Measure what a run should do by itself when its early warning of a collapse is critical.

Cells of the study that collapse are trained again, with exact lags, and with one policy each beside
the same prompts and seeds. The lag limit of a policy is decided by the host's own control loop
after every step, and the learning rate is lowered by the learner's own update.

    none               the study's cell: nothing limits the lag
    floor              the ESS floor halves the lag limit (`onCritical: Ignore`)
    halve              a critical warning counts as an ESS below the floor
    rate               the floor, and a critical warning halves the learning rate for good
    throttle           a critical warning sets the lag limit to 0 (`onCritical: Throttle`)
    throttle_and_slow  both (`onCritical: ThrottleAndSlow`, the default)
    slow_and_return    both, and the rate doubles again after 50 steps that are not critical

    python -m benchmarks.estimators.critical_policy              three methods, two seeds each
    python -m benchmarks.estimators.critical_policy --methods vcpo --seeds 101 --policies none
    python -m benchmarks.estimators.critical_policy --learning-rate 3e-5 --seeds 1 2   healthy cells

A cell takes about 25 seconds. The last line printed is JSON. For each policy, over the cells:

    final_accuracy         mean over the last quarter of the steps; `lowest` is the worst cell's
    mean_accuracy          mean of all evaluations: what the run was worth on the way
    cells_recovered        cells whose final accuracy is above 0.8 of their best evaluation
    steps_lost             mean number of steps from an evaluation below half of the best before it
                           to the first one above 0.8 of that best, or to the end
    steps_critical         mean number of steps with a critical warning
    mean_lag               mean lag of the batches, in policy versions; a small one costs throughput
    learning_rate_factor   mean of what the backoff left of the learning rate
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from transformers.utils.logging import disable_progress_bar

from vcpo.algo import RateBackoff, WarningLevel
from vcpo.algo.health.collapse import COLLAPSE_SHARE, RECOVERED_SHARE
from vcpo.control import RunSignals
from vcpo.records.step_record import UpdateRecord
from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import CriticalResponse
from vcpo_study.cells.cell import Cell
from vcpo_study.cells.experiment import Experiment
from vcpo_study.cells.lag_control import LagControl
from vcpo_study.cells.records import EvaluationRow
from vcpo_study.results.measures import final_accuracy
from vcpo_study.study import StudySpec, cell_spec, load_study, model_directory

_STUDY = Path("examples/study.yaml")
_CLEAN_STEPS = 50


class _Halving(LagControl):
    """A host to which a critical warning is an ESS of 0."""

    def signals(self, step: int, update: UpdateRecord) -> RunSignals:
        seen = super().signals(step, update)
        is_critical = WarningLevel(update.warning_level).is_at_least(WarningLevel.CRITICAL)
        return replace(seen, ess_ratio_mean=0.0) if is_critical else seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReturningBackoff(RateBackoff):
    """A backoff that takes one halving back after steps without a critical warning."""

    clean_steps: int = 0

    def observe(self, level: WarningLevel) -> _ReturningBackoff:
        after = RateBackoff.observe(self, level)
        if level.is_at_least(WarningLevel.CRITICAL):
            return replace(after, clean_steps=0)
        if self.clean_steps + 1 < _CLEAN_STEPS:
            return replace(after, clean_steps=self.clean_steps + 1)
        return replace(after, clean_steps=0, factor=min(1.0, 2.0 * after.factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """What a cell does about a critical warning."""

    controls_lag: bool = True
    halves: bool = False
    lag: CriticalResponse = CriticalResponse.IGNORE
    """As the control loop sees it."""
    rate: CriticalResponse = CriticalResponse.IGNORE
    """As the update sees it."""
    backoff: RateBackoff = field(default_factory=RateBackoff)


_BOTH = CriticalResponse.THROTTLE_AND_SLOW
_POLICIES = {
    "none": _Policy(controls_lag=False),
    "floor": _Policy(),
    "halve": _Policy(halves=True),
    "rate": _Policy(rate=_BOTH),
    "throttle": _Policy(lag=CriticalResponse.THROTTLE),
    "throttle_and_slow": _Policy(lag=_BOTH, rate=_BOTH),
    "slow_and_return": _Policy(lag=_BOTH, rate=_BOTH, backoff=_ReturningBackoff()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What one cell came to under one policy."""

    final_accuracy: float
    mean_accuracy: float
    best_accuracy: float
    lowest_accuracy: float
    steps_lost: int
    steps_critical: int
    mean_lag: float
    learning_rate_factor: float

    @property
    def recovered(self) -> bool:
        return self.final_accuracy > RECOVERED_SHARE * self.best_accuracy


class _Unlimited(LagControl):
    """A host that leaves the lag as it is."""

    def observe(self, step: int, update: UpdateRecord) -> None:
        self.lags.append(self.lag_steps)


def _run(cell: Cell, model: str, policy: _Policy) -> _Outcome:
    """Train one cell under one policy."""
    kind = _Halving if policy.halves else LagControl if policy.controls_lag else _Unlimited
    lag_control = kind(_responding(cell.spec, policy.lag))
    cell = replace(cell, spec=_responding(cell.spec, policy.rate))
    experiment = Experiment(cell, model, lag_control)
    experiment.update.health.backoff = policy.backoff
    steps, evaluations = experiment.run()
    accuracies = [each.accuracy for each in evaluations]
    levels = [WarningLevel(step.warning_level) for step in steps]
    return _Outcome(
        final_accuracy=final_accuracy(evaluations),
        mean_accuracy=fmean(accuracies),
        best_accuracy=max(accuracies),
        lowest_accuracy=min(accuracies),
        steps_lost=_steps_lost(evaluations),
        steps_critical=sum(level.is_at_least(WarningLevel.CRITICAL) for level in levels),
        mean_lag=fmean(min(step, lag) for step, lag in enumerate(lag_control.lags)),
        learning_rate_factor=steps[-1].learning_rate_backoff,
    )


def _responding(spec: VCPORunSpec, response: CriticalResponse) -> VCPORunSpec:
    control = spec.control.model_copy(update={"on_critical": response})
    return spec.model_copy(update={"control": control})


def _steps_lost(evaluations: Sequence[EvaluationRow]) -> int:
    """Count the steps from each collapse to the recovery after it."""
    best, lost, is_lost = evaluations[0].accuracy, 0, False
    for before, after in pairwise(evaluations):
        if after.accuracy < COLLAPSE_SHARE * best:
            is_lost = True
        elif after.accuracy > RECOVERED_SHARE * best:
            is_lost = False
        lost += after.step - before.step if is_lost else 0
        best = max(best, after.accuracy)
    return lost


def _summary(outcomes: Sequence[_Outcome]) -> dict[str, float]:
    """Return the numbers of one policy over its cells."""
    finals = [each.final_accuracy for each in outcomes]
    return {
        "cells": len(outcomes),
        "final_accuracy": round(fmean(finals), 3),
        "final_accuracy_lowest": round(min(finals), 3),
        "mean_accuracy": round(fmean(each.mean_accuracy for each in outcomes), 3),
        "cells_recovered": sum(each.recovered for each in outcomes),
        "steps_lost": round(fmean(each.steps_lost for each in outcomes), 1),
        "steps_critical": round(fmean(each.steps_critical for each in outcomes), 1),
        "mean_lag": round(fmean(each.mean_lag for each in outcomes), 1),
        "learning_rate_factor": round(fmean(each.learning_rate_factor for each in outcomes), 3),
    }


def _cells(study: StudySpec, options: argparse.Namespace) -> Iterable[Cell]:
    for seed in options.seeds:
        for name in options.methods:
            spec = cell_spec(
                study,
                study.method(name),
                lag=options.lag,
                learning_rate=options.learning_rate,
                seed=seed,
            )
            yield Cell(
                method=name,
                lag=options.lag,
                learning_rate=options.learning_rate,
                seed=seed,
                spec=spec,
                evaluation_seed=study.run.seed,
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["opob-only", "reinforce", "vcpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102])
    parser.add_argument("--policies", nargs="+", choices=_POLICIES, default=list(_POLICIES))
    parser.add_argument("--lag", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    return parser.parse_args()


def main() -> None:
    """Train every cell under every policy, and print the table and the JSON line."""
    options = _options()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    loaded = load_study(_STUDY)
    model = model_directory(loaded, _STUDY)
    outcomes: dict[str, list[_Outcome]] = {name: [] for name in options.policies}
    for cell in _cells(loaded.spec, options):
        for name in options.policies:
            started_s = time.monotonic()
            outcome = _run(cell, model, _POLICIES[name])
            outcomes[name].append(outcome)
            print(
                f"{cell.name:36s} {name:18s} final {outcome.final_accuracy:.3f}"
                f" lowest {outcome.lowest_accuracy:.2f} lost {outcome.steps_lost:3d}"
                f" critical {outcome.steps_critical:3d} lag {outcome.mean_lag:5.1f}"
                f" rate x {outcome.learning_rate_factor:g}"
                f" ({time.monotonic() - started_s:.0f} s)",
                flush=True,
            )
    print(json.dumps({name: _summary(each) for name, each in outcomes.items()}))


if __name__ == "__main__":
    main()
