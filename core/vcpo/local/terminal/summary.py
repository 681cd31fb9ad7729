"""Summary of a run as one JSON object."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from vcpo.api import VCPORun
from vcpo.judgement import Evidence, Grade, ended_phase, judgements, run_collapse
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.run_view import printable
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import EventRecord, Metrics, read_metrics
from vcpo.records.samples import Sample
from vcpo.report.numbers import duration, mean, whole
from vcpo.report.outcome import chance_text, held_out_text, left_out, resume_command
from vcpo.report.recorded_run import RecordedRun, recorded_signals


def run_summary(run_dir: Path, ending: Ending) -> dict[str, Any]:
    """Return the summary of a run from its records; a value without records is None.

    Accuracies are those of the first and the last evaluation. `trajectories` has the counts at the
    last step: leased = consumed + sum(dropped) + in_flight + buffered. A step's seconds are all
    from the end of the one before it.
    """
    metrics = read_metrics(run_dir)
    model = ExportedModel.read(RunDir(run_dir).model)
    steps, accuracies = metrics.steps, [each.accuracy for each in metrics.evaluations]
    taken = [step for step in steps if step.skipped is None]
    # A step with weights that are not finite reports an ESS ratio of 0, which no batch can have.
    ess_ratios = [step.ess_ratio for step in steps if step.ess_ratio > 0]
    last = steps[-1] if steps else None
    return {
        "state": ending.name.lower(),
        "accuracy_before": accuracies[0] if accuracies else None,
        "accuracy_after": accuracies[-1] if len(accuracies) > 1 else None,
        "steps": last.step if last else 0,
        "skipped_steps": len(steps) - len(taken),
        "seconds_per_step": mean(step.idle_s + step.step_s for step in steps),
        "learner_peak_gibibytes": last.learner_peak_gibibytes if last else None,
        "worker_peak_gibibytes": last.worker_peak_gibibytes if last else None,
        "model_parameters": model.parameters if model else None,
        "ranks": last.ranks if last else 0,
        "workers": max((step.workers for step in steps), default=0),
        "mismatch_nats_mean": mean(
            step.mismatch["gap_nats"] for step in steps if "gap_nats" in step.mismatch
        ),
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


class Ending(IntEnum):
    """How a local run ended; the value is the exit status of `vcpo run`."""

    COMPLETE = 0
    FAILED = 1
    COMPLETE_WITHOUT_UPDATE = 3
    """Every step was skipped; the model is unchanged."""
    COLLAPSED = 4
    """All steps were taken, and the reward collapsed and did not recover."""
    INTERRUPTED = 130

    @property
    def phase(self) -> str:
        return "no update" if self is Ending.COMPLETE_WITHOUT_UPDATE else self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The ending of a run and its explanation."""

    ending: Ending
    message: str = ""
    """One sentence; empty if the ending needs no explanation."""


def outcome_of_complete(
    run: VCPORun, metrics: Metrics, events: Sequence[EventRecord] = ()
) -> RunOutcome:
    """Return the outcome of a run that took all its steps, from its records."""
    evidence = Evidence(
        spec=run.spec,
        signals=recorded_signals(run, metrics, events=events),
        phase=ended_phase(metrics),
        metrics=metrics,
    )
    found = judgements(evidence)
    ending = {"collapsed": Ending.COLLAPSED, "no update": Ending.COMPLETE_WITHOUT_UPDATE}.get(
        evidence.phase, Ending.COMPLETE
    )
    message = " ".join(str(each) for each in found if each.grade is Grade.BAD)
    return RunOutcome(ending=ending, message=message)


_SHOWN_PAIRS: Final = 3
_SHOWN_CHARACTERS: Final = 72


def end_lines(recorded: RecordedRun, ending: Ending, report: Path | None) -> Iterator[str]:
    """Yield how a run ended, and prompts whose answers have another reward than before."""
    metrics, at = recorded.metrics, ""
    if ending in {Ending.INTERRUPTED, Ending.FAILED}:
        at = f" at step {whole(recorded.last_step)}"
    yield f"{ending.phase}{at}"
    if held_out := held_out_text(metrics):
        chance = chance_text(metrics)
        yield f"held-out reward  {held_out}{chance and f' ({chance})'}"
    steps = f"{whole(recorded.last_step)} of {whole(recorded.run.spec.steps)}"
    yield f"steps            {steps}, in {duration(recorded.clock.total_s)}"
    yield from (f"left out         {each}" for each in left_out(metrics))
    if report is not None:
        yield f"report           {report}"
    changed = [pair for pair in recorded.answers if pair[0].reward != pair[1].reward]
    for before, after in changed[:_SHOWN_PAIRS]:
        answer = f"  (right: {_one_line(before.answer)})" if before.answer else ""
        yield f"{_one_line(before.question or before.prompt)}{answer}"
        yield f"    before  {_format_answer(before)}"
        yield f"    after   {_format_answer(after)}"


def _format_answer(answer: Sample) -> str:
    return f"{_one_line(answer.response)}  (reward {answer.reward:g})"


def _one_line(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 3]}..."


def interruption_notice(
    run_file: Path, run_dir: Path, *, checkpoint_step: int | None, last_step: int
) -> str:
    """Return what a resume and an export of an interrupted run would find, a sentence each line."""
    start = checkpoint_step or 0
    later = f"step {last_step}" if last_step == start + 1 else f"steps {start + 1} to {last_step}"
    redone = f" and takes {later} anew" if last_step > start else ""
    told = f"`{resume_command(run_file, run_dir)}` goes on after step {start}{redone}."
    if checkpoint_step is None:
        return f"{told}\nThere is no checkpoint, so `vcpo export` has no model to write."
    export = shlex.join(["vcpo", "export", str(run_dir)])
    return f"{told}\n`{export}` writes the model of step {start}."
