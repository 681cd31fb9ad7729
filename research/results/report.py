"""Writes the report of one or several studies: `results.json`, `results.md` and the figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from research.cells.records import CellRecord
from research.results.alarms import WatchedRun, alarm_qualities, watched_run
from research.results.conditions import Condition, condition, condition_table
from research.results.figures import save_figures
from research.results.summary import (
    COMMON_HEADLINE_LAG,
    Headline,
    StudySummary,
    claim_records,
    has_variance_control,
    headline,
    headline_lag,
    summarize,
)
from research.results.tables import (
    alarm_table,
    best_rates_table,
    claim_table,
    gaps_table,
    headline_table,
    overview_table,
    plane_table,
    realised_ess_table,
    safe_rates_table,
    tuning_table,
)
from research.study import StudySpec, VCPOStudy
from vcpo.report.numbers import compact, decimal, duration

RESULTS_FOLDER: Final = "results"
"""Folder beside the report; each study has a folder of its name in it."""

_HEAD: Final = """\
# Results

```
{command}
```

A cell trains one method at one policy lag k, one learning rate and one seed. The batch of step s is
sampled by version max(0, s - k), exactly: by the real engine's decoding, and trained on by the real
update. {cells} cells took {cpu_time} of processor time.

- **Final accuracy**: mean of the evaluations in the last quarter of a cell's steps.
- **Target**: 0.95 of the best mean final accuracy of any method and rate at lag 0, on the tuning
  seeds. It is one number for all methods of a study.
- **Synchronous rate** of a method: the rate that reaches the target in the fewest steps at lag 0,
  on the tuning seeds, which nothing else uses. It stays as k grows.
- **Collapse**: an evaluation falls below half of the best one before it, or the final accuracy is
  below half of the target. Shares have their exact (Clopper-Pearson) interval of 95 %.
- **Steps over k = 0**: ratio of the medians over seeds, with its bootstrap interval of 95 %.
- **Safe rates**: the widest range of neighboring rates whose mean final accuracy reaches the
  target, in decades, interpolated between rates. `>=`: it reaches an end of the rates tried.
- **The others**: methods without variance control, which neither weigh their baseline by gradient
  norms nor scale their learning rate.

## In short: k = 32, or the largest of the study

{headlines}
"""
_STUDY: Final = """
## {name}

Task `{run.environment.name}`, {run.steps} steps of {run.batch.prompts_per_step} prompts x \
{run.batch.trajectories_per_prompt} trajectories, at most \
{run.sampling.max_new_tokens} new tokens; \
accuracy on {run.evaluation.prompts} held-out prompts every \
{run.evaluation.every_steps} steps. {cells} cells, {cpu_time} of processor time. Target: {target}. \
With variance control: {controlled}.

### All methods

Final accuracy at the synchronous rate without lag and at k = {lag}, with the collapses and the safe
decades there; on the right, final accuracy at k = {lag} and each learning rate of the plane.

{overview}

### Learning rates at k = 0

Final accuracy, and median steps to the target, over the tuning seeds; the synchronous rate is bold.

{tuning}
{never}
### At the synchronous rate

Final accuracy: mean ± standard deviation over seeds (lowest seed). Steps: median (range) over
seeds. Dip: largest fall of an evaluation below an earlier one, mean (largest) over seeds. ESS: of
{run.batch.trajectories} trajectories, median (5 % quantile) over steps. Log weights, in nats, are
untruncated: medians over steps of their quantiles in a batch, and the largest of all.
{claims}
![Collapses, final accuracy and safe rates by lag]({folder}/by_lag.svg)

![Accuracy by step, a panel per lag]({folder}/accuracy.svg)

![Log weights and ESS by step, by lag]({folder}/weights.svg)

### Safe rates

Decades of the mean curve (of each seed's own curve); decades for the method's own target, 0.95 of
its own best accuracy without lag; and the rates at which steps were really taken, from the lowest
to the highest requested rate that reaches the common target.
{development}
{safe}

### What {subject} gains

Final accuracy of {subject} minus that of each other method, each at its synchronous rate, mean over
pairs of one seed (interval of 95 %); steps to the target over those of the method.

{gaps}

### How stale the data of {subject} was

ESS ratio of a batch over the on-policy one, by eighths of a run: medians over steps, then over all
seeds.

{realised}

### The best rate at each lag

Final accuracy on the plane, for who tunes again at each lag.

{best}

### Every rate at every lag

Final accuracy, mean ± standard deviation over seeds; bold: it reaches the target. At k = 0 the
seeds are those of the tuning.

![Final accuracy by rate and lag, a heat map per method]({folder}/heat_maps.svg)
{plane}"""
_CONDITIONS: Final = """
## Conditions that nobody tuned

Methods at one rate, where no setting was chosen: {wins} of {judged} conditions are won, which means
that no other method ends above the interval of the default. The interval is the exact one of an
accuracy on so many held-out prompts; it does not hold the scatter of seeds. Of k = 0: accuracy over
that of the same method and rate without lag. ESS: median over steps of full lag. {cells} cells,
{cpu_time} of processor time.

{conditions}
"""
_ALARMS: Final = """
## Early warning

A collapse is here an evaluation below half of the best one before it, in a cell of any part. Lead
is counted from the first alarm, and is 0 without one. `warn` and `critical` are levels of the early
warning; `low_ess` is a mean ESS below 30 % of the on-policy one for 30 steps. No cell reacts to an
alarm. A row of a lag has the cells of all studies.

{alarms}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """Everything from which the report of one study is made."""

    study: VCPOStudy
    records: Sequence[CellRecord]
    """Records of all its finished cells, each once."""
    failures: Mapping[str, str]
    """Errors by the name of the cell."""

    @property
    def name(self) -> str:
        """Name of the study, and of the folder with its figures."""
        return self.study.metadata.name

    @property
    def spec(self) -> StudySpec:
        """The study without its name."""
        return self.study.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A study and the numbers computed from it."""

    data: StudyData
    summary: StudySummary
    headline: Headline
    runs: Sequence[WatchedRun]


def write_report(studies: Sequence[StudyData], folder: Path, command: str) -> Path:
    """Write the report's files into a folder and return the path of the document.

    command: what made it, as typed.
    """
    judged = [_judge(data) for data in studies if data.spec.tuning is not None]
    conditions = [
        (condition(data.name, data.spec, data.records), data.spec)
        for data in studies
        if data.spec.tuning is None
    ]
    for each in judged:
        data = each.data
        own = folder / RESULTS_FOLDER / data.name
        own.mkdir(parents=True, exist_ok=True)
        claims = claim_records(data.spec, data.records, each.summary.tuned)
        save_figures(data.spec, each.summary, claims, own)
    numbers = json.dumps(
        {**_numbers(judged, command), **_numbers_of_conditions(conditions)}, indent=1
    )
    (folder / "results.json").write_text(numbers + "\n", encoding="utf-8")
    document = folder / "results.md"
    document.write_text(_document(judged, conditions, command), encoding="utf-8")
    return document


def _judge(data: StudyData) -> _Judged:
    summary = summarize(data.spec, data.records)
    return _Judged(
        data=data,
        summary=summary,
        headline=headline(data.spec, summary),
        runs=[watched_run(record) for record in data.records],
    )


def _numbers(judged: Sequence[_Judged], command: str) -> dict[str, Any]:
    """Return `results.json`: a few numbers by study, method and lag, then every table."""
    runs = _runs(judged)
    headlines = {each.data.name: each.headline for each in judged}
    comparable = {n: found for n, found in headlines.items() if found.lag == COMMON_HEADLINE_LAG}
    return {
        "command": command,
        "collapse_probability": {each.data.name: _collapses(each.summary) for each in judged},
        "safe_rate_decades": {each.data.name: _widths(each.summary) for each in judged},
        "steps_ratio_k32": _ratios(comparable),
        "accuracy_gap": {each.data.name: _gaps(each.summary) for each in judged},
        "steps_over": {each.data.name: _steps_over(each.summary) for each in judged},
        "best_other_safe_decades_k32": {
            name: found.best_other_safe_decades for name, found in comparable.items()
        },
        "alarms": _numbers_of_alarms(runs),
        "alarms_by_lag": {lag: _numbers_of_alarms(of_lag) for lag, of_lag in _by_lag(runs).items()},
        "studies": {
            each.data.name: {
                "cells": len(each.data.records),
                "cpu_hours": round(_cpu_s([each]) / 3600, 2),
                "failed_cells": sorted(each.data.failures),
                "variance_control": _controlled(each.data.spec),
                "headline": asdict(each.headline),
                "alarms": _numbers_of_alarms(each.runs),
                **asdict(each.summary),
            }
            for each in judged
        },
    }


def _numbers_of_conditions(
    conditions: Sequence[tuple[Condition, StudySpec]],
) -> dict[str, Any]:
    """Return the number of conditions that the default wins, and each; nothing without any."""
    found = [each for each, _ in conditions]
    if not found:
        return {}
    return {
        "wins": sum(each.is_won is True for each in found),
        "conditions": {each.name: asdict(each) for each in found},
    }


def _ratios(headlines: Mapping[str, Headline]) -> dict[str, float | None]:
    """Return the subject's steps over its steps at lag 0, by study; intervals are further down."""
    ratios = {name: found.steps_ratio for name, found in headlines.items()}
    return {name: None if each is None else each.ratio for name, each in ratios.items()}


def _collapses(summary: StudySummary) -> dict[str, dict[str, list[float]]]:
    """Return share, interval and number of seeds, by method and lag."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in summary.claims:
        share = row.collapse
        numbers = [share.share, share.low, share.high, share.trials]
        found.setdefault(row.method, {})[str(row.lag)] = numbers
    return found


def _widths(summary: StudySummary) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in summary.safe:
        found.setdefault(row.method, {})[str(row.lag)] = row.decades
    return found


def _gaps(summary: StudySummary) -> dict[str, dict[str, list[float | None]]]:
    """Return what the subject gains, its interval and the number of pairs, by method and lag."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for row in summary.gaps:
        numbers = [row.accuracy, row.low, row.high, row.num_pairs]
        found.setdefault(row.method, {})[str(row.lag)] = numbers
    return found


def _steps_over(summary: StudySummary) -> dict[str, dict[str, float | None]]:
    """Return the subject's steps to the target over those of each method, by lag."""
    found: dict[str, dict[str, float | None]] = {}
    for row in summary.gaps:
        ratio = None if row.steps_over is None else row.steps_over.ratio
        found.setdefault(row.method, {})[str(row.lag)] = ratio
    return found


def _runs(judged: Iterable[_Judged]) -> list[WatchedRun]:
    return [run for each in judged for run in each.runs]


def _by_lag(runs: Sequence[WatchedRun]) -> dict[int, list[WatchedRun]]:
    lags = sorted({run.lag for run in runs})
    return {lag: [run for run in runs if run.lag == lag] for lag in lags}


def _numbers_of_alarms(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    return {name: asdict(found) for name, found in alarm_qualities(runs).items()}


def _document(
    judged: Sequence[_Judged],
    conditions: Sequence[tuple[Condition, StudySpec]],
    command: str,
) -> str:
    headlines = ((each.data.name, each.summary.target, each.headline) for each in judged)
    head = _HEAD.format(
        command=command,
        cells=sum(len(each.data.records) for each in judged),
        cpu_time=duration(_cpu_s(judged)),
        headlines=headline_table(headlines),
    )
    watched = {each.data.name: each.runs for each in judged}
    runs = _runs(judged)
    if len(judged) > 1:
        watched["all"] = runs
    watched |= {f"k = {lag}": of_lag for lag, of_lag in _by_lag(runs).items()}
    alarms = alarm_table((cells, alarm_qualities(of_cells)) for cells, of_cells in watched.items())
    sections = [*map(_section, judged), _section_of_conditions(conditions)]
    return "".join([head, *sections, _ALARMS.format(alarms=alarms)])


def _section_of_conditions(conditions: Sequence[tuple[Condition, StudySpec]]) -> str:
    found = [each for each, _ in conditions]
    if not found:
        return ""
    return _CONDITIONS.format(
        wins=sum(each.is_won is True for each in found),
        judged=sum(each.is_won is not None for each in found),
        cells=sum(each.cells for each in found),
        cpu_time=duration(3600 * sum(each.cpu_hours for each in found)),
        conditions=condition_table(conditions),
    )


def _section(judged: _Judged) -> str:
    data, summary = judged.data, judged.summary
    spec = data.spec
    claimed = sorted({row.lag for row in summary.claims})
    mapped = sorted({point.lag for point in summary.plane})
    section = _STUDY.format(
        name=data.name,
        lag=headline_lag(spec),
        run=spec.run,
        cells=len(data.records),
        cpu_time=duration(_cpu_s([judged])),
        target=decimal(summary.target, ".3f"),
        controlled=", ".join(_controlled(spec)) or "no method",
        overview=overview_table(spec, summary),
        tuning=tuning_table(spec, summary.tuned),
        never=_never_arrived(summary),
        claims="".join(
            f"\n**k = {lag}**\n\n{claim_table(spec, summary, lag)}\n" for lag in claimed
        ),
        folder=f"{RESULTS_FOLDER}/{data.name}",
        safe=safe_rates_table(spec, summary.safe),
        development=_development(spec),
        gaps=gaps_table(spec, summary.gaps),
        subject=spec.subject,
        realised=realised_ess_table(summary.realised),
        best=best_rates_table(spec, summary.plane),
        plane="".join(f"\n**k = {lag}**\n\n{plane_table(spec, summary, lag)}\n" for lag in mapped),
    )
    failures = [
        f"- `{name}`: {error.strip().splitlines()[-1]}\n"
        for name, error in sorted(data.failures.items())
    ]
    return "".join([section, "\n### Cells that failed\n\n" if failures else "", *failures])


def _never_arrived(summary: StudySummary) -> str:
    """Return a paragraph about methods that no rate brings to the target, else nothing."""
    names = [
        f"{each.method} ({compact(each.learning_rate)})"
        for each in summary.tuned
        if each.chosen and each.steps_to_target is None
    ]
    if not names:
        return ""
    return (
        f"\nNo rate reaches the target; the one that ends highest is taken: {', '.join(names)}.\n"
    )


def _development(spec: StudySpec) -> str:
    """Return a sentence about seeds that no claim counts, else nothing."""
    seeds = ", ".join(map(str, spec.development_seeds))
    return f"Settings were chosen on seeds {seeds}, which do not count here.\n" if seeds else ""


def _controlled(spec: StudySpec) -> list[str]:
    return [each.name for each in spec.methods if has_variance_control(spec, each)]


def _cpu_s(judged: Iterable[_Judged]) -> float:
    return sum(record.cpu_s for each in judged for record in each.data.records)
