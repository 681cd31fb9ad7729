"""What differs between runs: their results, their specs, and what makes them hard to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from vcpo.algo import REWARD_WINDOW_STEPS
from vcpo.records.failure import failure_of
from vcpo.report.numbers import UNKNOWN, decimal, duration, finite, mean, whole
from vcpo.report.recorded_run import RecordedRun, damage_notice, read_run, require_records
from vcpo.report.summary import State, state_of

_UNSET = "not set"


class Better(StrEnum):
    """Which value of a result is the best one."""

    HIGH = "high"
    LOW = "low"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result of all runs: a row of the table."""

    label: str
    note: str
    """What is better, or the unit, in words."""
    cells: tuple[str, ...]
    """One for each run."""
    best: frozenset[int]
    """Places of the best cells; empty where there is no best one or all are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecChange:
    """A field of the spec that is not equal in all runs."""

    path: str
    """E.g. `spec.optimizer.learningRate`."""
    values: tuple[str, ...]
    """One for each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    label: str
    note: str
    better: Better
    value: Callable[[RecordedRun], float | None]
    form: Callable[[float | None], str]


def read_runs(run_dirs: Sequence[Path]) -> tuple[RecordedRun, ...]:
    """Read run directories; a run is named after its directory.

    Raises:
        MissingRecordsError: when a directory has no run or no journal.
        SpecError: when a `spec.yaml` is not a run.
    """
    for run_dir in run_dirs:
        require_records(run_dir)
    return tuple(map(read_run, run_dirs, _names(run_dirs)))


def results(runs: Sequence[RecordedRun]) -> tuple[Result, ...]:
    """Return the final numbers of the runs, each row with its best value marked."""
    return tuple(_result(measure, runs) for measure in _MEASURES)


def spec_changes(runs: Sequence[RecordedRun]) -> tuple[SpecChange, ...]:
    """Return the fields that differ, by path, defaults filled in."""
    documents = [dict(_flat(each.run.model_dump(mode="json", by_alias=True))) for each in runs]
    paths = dict.fromkeys(path for document in documents for path in document)
    rows = (
        SpecChange(path=path, values=tuple(each.get(path, _UNSET) for each in documents))
        for path in paths
    )
    return tuple(row for row in rows if len(set(row.values)) > 1)


def cautions(runs: Sequence[RecordedRun]) -> tuple[str, ...]:
    """Return what a reader must know before comparing these runs, a sentence each."""
    return (*_endings(runs), *_other_tasks(runs), *_damaged_lines(runs))


def _endings(runs: Sequence[RecordedRun]) -> Iterator[str]:
    for each in runs:
        state = state_of(each.run, each.metrics, each.events)
        if state is State.FAILED:
            yield f"{each.name} failed: {failure_of(each.events)}"
        elif state is State.UNFINISHED:
            last = whole(each.metrics.steps[-1].step)
            yield f"{each.name} is unfinished: {last} of {whole(each.run.spec.steps)} steps."
        elif state is State.EMPTY:
            yield f"{each.name} has no steps yet."
        elif state is State.COLLAPSED:
            yield f"{each.name} collapsed; its own report says when."
        elif state is State.NO_UPDATE:
            yield f"No step of {each.name} made an update; its own report says why."


def _other_tasks(runs: Sequence[RecordedRun]) -> Iterator[str]:
    for label, value in (
        ("environments", lambda each: each.run.spec.environment.name),
        ("models", lambda each: each.run.spec.model.name),
    ):
        if len(found := Counter(map(value, runs))) > 1:
            yield f"The runs have different {label} ({', '.join(found)}): rewards do not compare."


def _damaged_lines(runs: Sequence[RecordedRun]) -> Iterator[str]:
    for each in runs:
        if (notice := damage_notice(each)) is not None:
            yield f"{each.name}: {notice}"


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell the runs apart."""
    resolved = [path.resolve() for path in run_dirs]
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({place})" for place, path in enumerate(resolved, start=1)]


def _result(measure: _Measure, runs: Sequence[RecordedRun]) -> Result:
    values = [finite(measure.value(each)) for each in runs]
    cells = tuple(measure.form(value) for value in values)
    known = [value for value in values if value is not None]
    best: frozenset[int] = frozenset()
    if measure.better is not Better.NEITHER and len(set(cells) - {UNKNOWN}) > 1:
        wanted = cells[values.index((max if measure.better is Better.HIGH else min)(known))]
        best = frozenset(place for place, cell in enumerate(cells) if cell == wanted)
    return Result(label=measure.label, note=measure.note, cells=cells, best=best)


def _flat(document: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(document, Mapping) and document:
        for name, value in document.items():
            yield from _flat(value, f"{path}.{name}" if path else name)
    elif isinstance(document, list) and document:
        for place, value in enumerate(document):
            yield from _flat(value, f"{path}[{place}]")
    else:
        yield path, _UNSET if document is None else str(document)


def _accuracies(recorded: RecordedRun) -> list[float]:
    return [each.accuracy for each in recorded.metrics.evaluations]


def _dropped_share(recorded: RecordedRun) -> float | None:
    if not recorded.metrics.steps or not recorded.metrics.steps[-1].leased:
        return None
    last = recorded.metrics.steps[-1]
    return sum(last.dropped.values()) / last.leased


def _lowest_relative_ess(recorded: RecordedRun) -> float | None:
    ratios = (step.relative_ess_ratio for step in recorded.metrics.steps)
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _highest_warning(recorded: RecordedRun) -> float | None:
    return max((step.warning_score for step in recorded.metrics.steps), default=None)


_MEASURES: Final = (
    _Measure(
        label="Final accuracy",
        note="held out, last evaluation",
        better=Better.HIGH,
        value=lambda each: next(reversed(_accuracies(each)), None),
        form=lambda value: decimal(value, ".3f"),
    ),
    _Measure(
        label="Best accuracy",
        note="held out",
        better=Better.HIGH,
        value=lambda each: max(_accuracies(each), default=None),
        form=lambda value: decimal(value, ".3f"),
    ),
    _Measure(
        label="Final reward",
        note=f"mean of the last {REWARD_WINDOW_STEPS} steps",
        better=Better.HIGH,
        value=lambda each: mean(
            step.reward_mean for step in each.metrics.steps[-REWARD_WINDOW_STEPS:]
        ),
        form=lambda value: decimal(value, ".3f"),
    ),
    _Measure(
        label="Steps",
        note="taken",
        better=Better.NEITHER,
        value=lambda each: each.metrics.steps[-1].step if each.metrics.steps else 0,
        form=lambda value: decimal(value, ",.0f"),
    ),
    _Measure(
        label="Skipped",
        note="share of the steps",
        better=Better.LOW,
        value=lambda each: mean(step.skipped is not None for step in each.metrics.steps),
        form=lambda value: decimal(value, ".1%"),
    ),
    _Measure(
        label="Wall time",
        note="from the start",
        better=Better.NEITHER,
        value=lambda each: each.clock.total_s,
        form=duration,
    ),
    _Measure(
        label="Throughput",
        note="tokens per second, mean",
        better=Better.HIGH,
        value=lambda each: mean(step.tokens_per_s for step in each.metrics.steps),
        form=lambda value: decimal(value, ",.0f"),
    ),
    _Measure(
        label="Policy lag",
        note="versions, mean",
        better=Better.NEITHER,
        value=lambda each: mean(step.lag_mean for step in each.metrics.steps),
        form=lambda value: decimal(value, ".2f"),
    ),
    _Measure(
        label="Lowest relative ESS",
        note="share of on-policy",
        better=Better.HIGH,
        value=_lowest_relative_ess,
        form=lambda value: decimal(value, ".3f"),
    ),
    _Measure(
        label="Highest early warning",
        note="2/3 is critical",
        better=Better.LOW,
        value=_highest_warning,
        form=lambda value: decimal(value, ".2f"),
    ),
    _Measure(
        label="Dropped",
        note="share of the leased trajectories",
        better=Better.LOW,
        value=_dropped_share,
        form=lambda value: decimal(value, ".1%"),
    ),
)
