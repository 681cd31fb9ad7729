"""Measure what a run should do by itself when it seems to collapse, or has collapsed.

Cells of the study that collapse are trained again, with exact lags, and with one policy each beside
the same prompts and seeds. The lag limit of a policy is decided by the host's own control loop
after every step, and the learning rate is lowered by the learner's own update.

    none               the study's cell: nothing limits the lag
    floor              the ESS floor halves the lag limit (`health.enabled: false`)
    halve              a critical warning counts as an ESS below the floor
    rate               the floor, and a critical warning halves the learning rate
    throttle           a critical warning sets the lag limit to 0
    throttle_and_slow  both
    slow_for_good      both, and the rate does not return
    skip               both, and steps with an ESS that adds to a critical warning are skipped
    roll_back          both, and a collapse of the reward rolls back (the default)
    roll_back_alone    the floor, and a collapse of the reward rolls back
    roll_back_early    both, and a critical warning rolls back too

    python -m benchmarks.estimators.critical_policy              three methods, two seeds each
    python -m benchmarks.estimators.critical_policy --methods vcpo --seeds 101 --policies none
    python -m benchmarks.estimators.critical_policy --learning-rate 3e-5 --seeds 1 2   healthy cells
    python -m benchmarks.estimators.critical_policy --study examples/studies/countdown.yaml
        --methods vcpo2 --learning-rate 1e-4 --seeds 1 2 3 4 --policies roll_back
        --false-alarm 100 --evaluate-every 8           what one false alarm costs a healthy cell
    python -m benchmarks.estimators.critical_policy --study examples/studies/sort-long.yaml
        --methods vcpo-batch --seeds 1 2 3 --policies throttle          another study's cells

A cell takes about 25 seconds. The last line printed is JSON. For each policy, over the cells:

    final_accuracy         mean over the last quarter of the steps; `lowest` is the worst cell's
    mean_accuracy          mean of all evaluations: what the run was worth on the way
    cells_recovered        cells whose final accuracy is above 0.8 of their best evaluation
    steps_lost             mean number of steps from an evaluation below half of the best before it
                           to the first one above 0.8 of that best, or to the end
    steps_critical         mean number of steps with a critical warning
    mean_lag               mean lag of the batches, in policy versions; a small one costs throughput
    learning_rate_factor   mean of what the backoff left of the learning rate
    rate_steps_lost        mean number of whole steps that the backoff took: the sum of 1 - factor
    steps_to_target        mean number of steps until three evaluations in a row have a mean of at
                           least `--target`; the length of a cell that never has
    rollbacks              mean number of rollbacks, at most 2; checkpoints are 25 steps apart
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from transformers.utils.logging import disable_progress_bar

from research.cells.cell import Cell
from research.cells.experiment import Experiment
from research.cells.lag_control import LagControl
from research.cells.records import EvaluationRow
from research.results.measures import final_accuracy
from research.study import StudySpec, cell_spec, load_study, model_directory
from vcpo.algo.health.collapse import COLLAPSE_SHARE, RECOVERED_SHARE
from vcpo.algo.health.early_warning import StepHealth, WarningLevel
from vcpo.algo.health.guards import RollbackNeed, Rollbacks
from vcpo.algo.health.rate_backoff import RateBackoff
from vcpo.api import VCPORunSpec
from vcpo.api.health import GuardLevel, Health, RollbackTrigger
from vcpo.control.signals import RunSignals
from vcpo.records.step_record import UpdateRecord
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.result import UpdateResult
from vcpo_learner.update.run_health import RunHealth

_CHECKPOINT_STEPS = 25
_FALSE_STEPS = 8
"""Steps of a false alarm. Seven at 0 take the mean of a healthy run below the critical 0.22."""


class _Halving(LagControl):
    """A host to which a critical warning is an ESS of 0."""

    def signals(self, step: int, update: UpdateRecord) -> RunSignals:
        seen = super().signals(step, update)
        is_critical = WarningLevel(update.warning_level).is_at_least(WarningLevel.CRITICAL)
        return replace(seen, ess_ratio_mean=0.0) if is_critical else seen


class _LastingBackoff(RateBackoff):
    """A backoff whose rate does not return."""

    def observe(self, *, is_warned: bool, is_well: bool = False) -> Self:
        return super().observe(is_warned=is_warned)


class _FalselyAlarmed(RunHealth):
    """The health of a run of which some steps are read as if no response were good."""

    def __init__(self, spec: VCPORunSpec, first_step: int) -> None:
        super().__init__(spec)
        self._false_steps = range(first_step, first_step + _FALSE_STEPS)
        self._step = 0

    def _observe(self, step: StepHealth, rewards: Sequence[float]) -> None:
        self._step += 1
        is_false = self._step in self._false_steps
        super()._observe(replace(step, relative_ess=0.0) if is_false else step, rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    """What a cell does about a critical warning."""

    controls_lag: bool = True
    halves: bool = False
    health: Health = field(default_factory=lambda: Health(enabled=False))
    backoff: RateBackoff = field(default_factory=RateBackoff)


def _health(**changes: GuardLevel | RollbackTrigger) -> Health:
    """Return the default guards without rollbacks, changed."""
    return Health.model_validate({"roll_back_on": RollbackTrigger.NEVER} | changes, by_name=True)


_POLICIES = {
    "none": _Policy(controls_lag=False),
    "floor": _Policy(),
    "halve": _Policy(halves=True),
    "rate": _Policy(health=_health(throttle_from=GuardLevel.NEVER)),
    "throttle": _Policy(health=_health(slow_from=GuardLevel.NEVER)),
    "throttle_and_slow": _Policy(health=_health()),
    "slow_for_good": _Policy(health=_health(), backoff=_LastingBackoff()),
    "skip": _Policy(health=_health(skip_from=GuardLevel.CRITICAL)),
    "roll_back": _Policy(health=Health()),
    "roll_back_alone": _Policy(
        health=_health(
            throttle_from=GuardLevel.NEVER,
            slow_from=GuardLevel.NEVER,
            roll_back_on=RollbackTrigger.COLLAPSE,
        )
    ),
    "roll_back_early": _Policy(health=_health(roll_back_on=RollbackTrigger.CRITICAL)),
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
    rate_steps_lost: float
    steps_to_target: int
    rollbacks: int

    @property
    def recovered(self) -> bool:
        return self.final_accuracy > RECOVERED_SHARE * self.best_accuracy


class _Unlimited(LagControl):
    """A host that leaves the lag as it is."""

    def observe(self, step: int, update: UpdateRecord) -> None:
        self.lags.append(self.lag_steps)


class _SinceRollback(LagControl):
    """A host, and a learner that trains on nothing from before a rollback."""

    rollbacks = Rollbacks()

    @property
    def lag_steps(self) -> int:
        largest = self.rollbacks.largest_lag_steps(len(self.lags))
        limit = super().lag_steps
        return limit if largest is None else min(limit, largest)


class _RollingExperiment(Experiment):
    """A cell that goes back to its last good checkpoint, as a learner does."""

    def __init__(self, cell: Cell, model: str, lag_control: LagControl, folder: Path) -> None:
        super().__init__(cell, model, lag_control)
        self._checkpoints: dict[int, dict[str, Any]] = {}
        self._folder = folder
        self._age_steps = cell.spec.rollback_age_steps

    def step(self, version: int, groups: list[list[Trajectory]]) -> UpdateResult:
        result = super().step(version, groups)
        step, health = version + 1, self.update.health
        good = [one for one in self._checkpoints if one <= step - self._age_steps]
        is_due = health.rollback_need is RollbackNeed.DUE and bool(good)
        if is_due:
            state = self._checkpoints[max(good)]
            warning = health.rolled_back_state(state["warning"], version=step)
            self.update.load_tensors(self._folder / str(max(good)))
            self.update.load_state_dict({**state, "warning": warning})
            if isinstance(self._lag_control, _SinceRollback):
                self._lag_control.rollbacks = health.rollbacks
        if is_due or (step % _CHECKPOINT_STEPS == 0 and health.is_good):
            self.update.save_tensors(self._folder / str(step)).result()
            self._checkpoints[step] = deepcopy(self.update.state_dict())
        return result


def _run(cell: Cell, model: str, policy: _Policy, options: argparse.Namespace) -> _Outcome:
    """Train one cell under one policy."""
    kind = _Halving if policy.halves else _SinceRollback if policy.controls_lag else _Unlimited
    cell = replace(cell, spec=cell.spec.model_copy(update={"health": policy.health}))
    lag_control = kind(cell.spec)
    with TemporaryDirectory() as folder:
        experiment = _RollingExperiment(cell, model, lag_control, Path(folder))
        if options.false_alarm is not None:
            experiment.update.health = _FalselyAlarmed(cell.spec, options.false_alarm)
        experiment.update.health.backoff = policy.backoff
        steps, evaluations = experiment.run()
        experiment.update.close()
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
        rate_steps_lost=sum(1.0 - step.learning_rate_backoff for step in steps),
        steps_to_target=_steps_to(options.target, evaluations),
        rollbacks=experiment.update.health.rollbacks.number,
    )


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


def _steps_to(target: float, evaluations: Sequence[EvaluationRow]) -> int:
    """Return the step of the first evaluation that begins three with a mean of the target."""
    for first in range(len(evaluations) - 2):
        if fmean(each.accuracy for each in evaluations[first : first + 3]) >= target:
            return evaluations[first].step
    return evaluations[-1].step


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
        "rollbacks": round(fmean(each.rollbacks for each in outcomes), 2),
        "learning_rate_factor": round(fmean(each.learning_rate_factor for each in outcomes), 3),
        "rate_steps_lost": round(fmean(each.rate_steps_lost for each in outcomes), 1),
        "steps_to_target": round(fmean(each.steps_to_target for each in outcomes), 1),
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
            if options.evaluate_every is not None:
                changes = {"every_steps": options.evaluate_every}
                evaluation = spec.evaluation.model_copy(update=changes)
                spec = spec.model_copy(update={"evaluation": evaluation})
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
    parser.add_argument("--study", type=Path, default=Path("examples/study.yaml"))
    parser.add_argument("--methods", nargs="+", default=["opob-only", "reinforce", "vcpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102])
    parser.add_argument("--policies", nargs="+", choices=_POLICIES, default=list(_POLICIES))
    parser.add_argument("--lag", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--false-alarm", type=int, help="first step of one that all cells have")
    parser.add_argument("--evaluate-every", type=int, help="steps; default: as the study says")
    parser.add_argument("--target", type=float, default=0.5, help="of `steps_to_target`")
    return parser.parse_args()


def main() -> None:
    """Train every cell under every policy, and print the table and the JSON line."""
    options = _options()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    loaded = load_study(options.study)
    model = model_directory(loaded, options.study)
    outcomes: dict[str, list[_Outcome]] = {name: [] for name in options.policies}
    for cell in _cells(loaded.spec, options):
        for name in options.policies:
            started_s = time.monotonic()
            outcome = _run(cell, model, _POLICIES[name], options)
            outcomes[name].append(outcome)
            print(
                f"{cell.name:36s} {name:18s} final {outcome.final_accuracy:.3f}"
                f" lowest {outcome.lowest_accuracy:.2f} lost {outcome.steps_lost:3d}"
                f" critical {outcome.steps_critical:3d} lag {outcome.mean_lag:5.1f}"
                f" rate x {outcome.learning_rate_factor:g} rollbacks {outcome.rollbacks}"
                f" rate lost {outcome.rate_steps_lost:.1f} target {outcome.steps_to_target}"
                f" mean {outcome.mean_accuracy:.4f}"
                f" ({time.monotonic() - started_s:.0f} s)",
                flush=True,
            )
    print(json.dumps({name: _summary(each) for name, each in outcomes.items()}))


if __name__ == "__main__":
    main()
