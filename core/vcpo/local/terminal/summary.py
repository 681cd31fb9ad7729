"""Summary of a run as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.ending import Ending
from vcpo.records.collapse import run_collapse
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import Metrics, read_metrics
from vcpo.records.step_record import StepRecord
from vcpo.report.numbers import mean


def run_summary(run_dir: Path, ending: Ending) -> dict[str, Any]:
    """Return the summary of a run from its records; a value without records is None.

    `state` is the name of the ending in lower case. Accuracies are those of the first and the last
    evaluation. `collapse` is also told of a run that recovered. `trajectories` has the counts at
    the last step: leased = consumed + sum(dropped) + in_flight + buffered. The model's parameters
    are those of the model that the run left, and a step's seconds are all from the end of the one
    before it.
    """
    metrics = read_metrics(run_dir)
    model = ExportedModel.read(RunDir(run_dir).model)
    steps = metrics.steps
    taken = [step for step in steps if step.skipped is None]
    # A step with weights that are not finite reports an ESS ratio of 0, which no batch can have.
    ess_ratios = [step.ess_ratio for step in steps if step.ess_ratio > 0]
    last = steps[-1] if steps else None
    return {
        "state": ending.name.lower(),
        "accuracy_before": _accuracy(metrics, 0),
        "accuracy_after": _accuracy(metrics, -1),
        "steps": last.step if last else 0,
        "skipped_steps": len(steps) - len(taken),
        "seconds_per_step": mean(step.idle_s + step.step_s for step in steps),
        "learner_peak_gibibytes": last.learner_peak_gibibytes if last else None,
        "worker_peak_gibibytes": last.worker_peak_gibibytes if last else None,
        "model_parameters": model.parameters if model else None,
        "ranks": last.ranks if last else 0,
        "workers": max((step.workers for step in steps), default=0),
        "mismatch_nats_mean": mean(_mismatches(steps)),
        "policy_lag_max": max((step.lag_max for step in steps), default=None),
        "policy_lag_mean": mean(step.lag_mean for step in steps),
        "ess_ratio_min": min(ess_ratios, default=None),
        "learning_rate_scale_min": min((step.learning_rate_scale for step in taken), default=None),
        "warning_score_max": max((step.warning_score for step in steps), default=None),
        "collapse": _collapse(metrics),
        "weight_updates_in_flight": last.weight_updates_in_flight if last else 0,
        "adapter_swaps": last.adapter_swaps if last else 0,
        "merged": last.merged_versions if last else 0,
        "trajectories": {
            "leased": last.leased if last else 0,
            "consumed": last.consumed if last else 0,
            "dropped": dict(last.dropped) if last else {},
            "in_flight": last.in_flight if last else 0,
            "buffered": last.buffered if last else 0,
        },
        "report": str(run_dir / "report.html"),
    }


def _mismatches(steps: Iterable[StepRecord]) -> Iterator[float]:
    """Yield the gaps of sampler and learner at equal version, nats per token, where measured."""
    return (step.mismatch["gap_nats"] for step in steps if "gap_nats" in step.mismatch)


def _collapse(metrics: Metrics) -> dict[str, Any] | None:
    found = run_collapse(metrics)
    if found is None:
        return None
    return {
        "measure": found.measure.name.lower(),
        "step": found.fall.step,
        "share_of_best_at_end": found.fall.last / found.fall.best,
        "recovered": found.fall.has_recovered,
    }


def _accuracy(metrics: Metrics, index: int) -> float | None:
    return metrics.evaluations[index].accuracy if metrics.evaluations else None
