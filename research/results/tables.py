"""The tables of a study's report, in Markdown; every method has its row in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from research.cells.records import LOG_WEIGHT_QUANTILES
from research.results.alarms import AlarmQuality
from research.results.claims import ClaimRow
from research.results.gaps import Gap
from research.results.median_ratio import MedianRatio
from research.results.plane import PlanePoint, SafeRates
from research.results.proportion import Proportion
from research.results.realised_ess import PARTS, RealisedEss
from research.results.summary import Headline, StudySummary, headline_lag
from research.results.tuning import TunedRate
from research.study import StudySpec
from vcpo.report.numbers import UNKNOWN, compact, decimal

_HEADLINE_COLUMNS: Final = (
    "study",
    "target",
    "k",
    "subject",
    "collapsed",
    "most collapsed of the others",
    "safe decades",
    "widest of the others",
    "steps, over k = 0",
)
_CLAIM_COLUMNS: Final = (
    "method",
    "rate",
    "collapsed",
    "final accuracy",
    "steps to target",
    "deepest dip",
    "ESS",
    "log weights: 1 %, median, 99 %, largest",
)
_ALARM_COLUMNS: Final = (
    "cells",
    "alarm",
    "collapses warned of",
    "median lead, steps",
    "false alarms in the other cells",
)
_SHOWN_QUANTILES: Final = tuple(LOG_WEIGHT_QUANTILES.index(at) for at in (0.01, 0.5, 0.99, 1.0))
_Column = TypeVar("_Column", bound=float)


def headline_table(headlines: Iterable[tuple[str, float | None, Headline]]) -> str:
    """Return a row for each study: its name, its target and its headline."""
    lines = []
    for name, target, found in headlines:
        most, widest = found.most_collapsed_other, found.widest_other
        lines.append(
            (
                name,
                decimal(target, ".3f"),
                str(found.lag),
                found.subject,
                _collapses(found.collapse),
                UNKNOWN if most is None else f"{most}: {_collapses(found.most_other_collapse)}",
                decimal(found.safe_decades, ".2f"),
                UNKNOWN
                if widest is None
                else f"{widest}: {decimal(found.best_other_safe_decades, '.2f')}",
                _multiple(found.steps_ratio),
            )
        )
    return table(_HEADLINE_COLUMNS, lines)


def overview_table(study: StudySpec, summary: StudySummary) -> str:
    """Return a row for each method: lag 0 and the headline's at its synchronous rate; all rates."""
    lag = headline_lag(study)
    columns = ["method", "rate", "k = 0", f"k = {lag}", "collapsed"]
    columns += [f"steps, k = {lag} over k = 0", "safe decades", *_rates(study).values()]
    at_rates = {
        (each.method, each.learning_rate): f"{each.final_accuracy_mean:.3f}"
        for each in summary.plane
        if each.lag == lag
    }
    chosen = {each.method: compact(each.learning_rate) for each in summary.tuned if each.chosen}
    lines = []
    for method in study.methods:
        synchronous, stale = summary.claim(method.name, 0), summary.claim(method.name, lag)
        lines.append(
            (
                method.label,
                chosen.get(method.name, UNKNOWN),
                UNKNOWN if synchronous is None else _spread(synchronous),
                UNKNOWN if stale is None else _spread(stale),
                _collapses(None if stale is None else stale.collapse),
                _multiple(summary.steps_ratio(method.name, lag)),
                decimal(summary.safe_decades(method.name, lag), ".2f"),
                *(at_rates.get((method.name, rate), UNKNOWN) for rate in _rates(study)),
            )
        )
    return table(columns, lines)


def tuning_table(study: StudySpec, tuned: Iterable[TunedRate]) -> str:
    """Return final accuracy and steps to the target of each method by rate, the chosen one bold."""
    shown = {}
    for each in tuned:
        found = f"{each.final_accuracy:.3f}, {decimal(each.steps_to_target, '.0f')}"
        shown[each.method, each.learning_rate] = f"**{found}**" if each.chosen else found
    return _by_method(study, shown, _rates(study))


def claim_table(study: StudySpec, summary: StudySummary, lag: int) -> str:
    """Return what is claimed of each method at a lag and at its synchronous rate."""
    rows = ((method.label, summary.claim(method.name, lag)) for method in study.methods)
    return table(_CLAIM_COLUMNS, [(label, *_claim(row)) for label, row in rows if row is not None])


def safe_rates_table(study: StudySpec, safe: Iterable[SafeRates]) -> str:
    """Return by lag how wide each method's safe rates are, also for its own target, and taken."""
    shown = {}
    for each in safe:
        sign = ">= " if each.range is not None and each.range.is_cut else ""
        seeds = ", ".join(f"{width:.2f}" for width in each.seed_decades)
        text = f"{sign}{each.decades:.2f} ({seeds}); own {each.own_decades:.2f}"
        if each.taken is not None:
            text += f"; taken {' to '.join(f'{rate:.1e}' for rate in each.taken)}"
        shown[each.method, each.lag] = text
    return _by_method(study, shown, _lags(shown))


def gaps_table(study: StudySpec, found: Iterable[Gap]) -> str:
    """Return by lag what the subject gains over each method, and its steps over the method's."""
    shown = {}
    for each in found:
        text = f"{each.accuracy:+.3f}"
        if each.low is not None and each.high is not None:
            text += f" ({each.low:+.3f} to {each.high:+.3f})"
        ratio = None if each.steps_over is None else each.steps_over.ratio
        shown[each.method, each.lag] = f"{text}, {decimal(ratio, '.2f')}"
    return _by_method(study, shown, _lags(shown))


def best_rates_table(study: StudySpec, plane: Iterable[PlanePoint]) -> str:
    """Return the highest final accuracy of any rate of each method by lag, and its lowest rate."""
    best: dict[tuple[str, int], PlanePoint] = {}
    for each in sorted(plane, key=lambda point: point.learning_rate):
        place = each.method, each.lag
        if place not in best or each.final_accuracy_mean > best[place].final_accuracy_mean:
            best[place] = each
    shown = {
        place: f"{_spread(each)} at {compact(each.learning_rate)}" for place, each in best.items()
    }
    return _by_method(study, shown, _lags(shown))


def plane_table(study: StudySpec, summary: StudySummary, lag: int) -> str:
    """Return the final accuracy of each method by rate at a lag; those at the target are bold."""
    shown = {}
    for each in summary.plane:
        if each.lag == lag:
            found = _spread(each)
            is_safe = summary.target is not None and each.final_accuracy_mean >= summary.target
            shown[each.method, each.learning_rate] = f"**{found}**" if is_safe else found
    return _by_method(study, shown, _rates(study))


def realised_ess_table(realised: Iterable[RealisedEss]) -> str:
    """Return a row for each lag and rate, with a column for each part of the run."""
    columns = ["k", "rate", "seeds", *(f"{part + 1}/{PARTS}" for part in range(PARTS))]
    lines = (
        (
            str(each.lag),
            compact(each.learning_rate),
            str(each.num_seeds),
            *(decimal(ratio, ".2f") for ratio in each.ratios),
        )
        for each in realised
    )
    return table(columns, lines)


def alarm_table(alarms: Iterable[tuple[str, Mapping[str, AlarmQuality]]]) -> str:
    """Return a row for each set of cells, given with its name, and alarm."""
    lines = (
        (
            cells,
            name,
            f"{found.num_warned} of {found.num_collapses}",
            decimal(found.lead_steps, ".0f"),
            decimal(found.false_alarm_rate, ".1%"),
        )
        for cells, qualities in alarms
        for name, found in qualities.items()
    )
    return table(_ALARM_COLUMNS, lines)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    head, *body = (f"| {' | '.join(line)} |" for line in (columns, *lines))
    return "\n".join([head, "|---" * len(columns) + "|", *body])


def _by_method(
    study: StudySpec, shown: Mapping[tuple[str, _Column], str], columns: Mapping[_Column, str]
) -> str:
    """Return a table of methods by rate or by lag; methods without a number have no row.

    shown: text by method and column. columns: title of each column.
    """
    lines = []
    for method in study.methods:
        texts = [shown.get((method.name, column), UNKNOWN) for column in columns]
        if set(texts) != {UNKNOWN}:
            lines.append((method.label, *texts))
    return table(["method", *columns.values()], lines)


def _spread(row: PlanePoint | ClaimRow) -> str:
    """Return mean and standard deviation of the final accuracies, which one seed does not have."""
    if row.num_seeds < 2:
        return f"{row.final_accuracy_mean:.3f}"
    return f"{row.final_accuracy_mean:.3f} ± {row.final_accuracy_std:.3f}"


def _lags(places: Iterable[tuple[str, int]]) -> Mapping[int, str]:
    return {lag: f"k = {lag}" for lag in sorted({lag for _, lag in places})}


def _rates(study: StudySpec) -> Mapping[float, str]:
    return {rate: compact(rate) for rate in sorted(study.learning_rates)}


def _claim(row: ClaimRow) -> Sequence[str]:
    ends = (decimal(each, ".0f") for each in (row.steps_to_target_min, row.steps_to_target_max))
    weights = row.log_weights
    shown = [] if weights is None else [f"{weights[index]:z.2f}" for index in _SHOWN_QUANTILES]
    return (
        compact(row.learning_rate),
        _collapses(row.collapse),
        f"{_spread(row)} ({row.final_accuracy_min:.3f})",
        f"{decimal(row.steps_to_target, '.0f')} ({' to '.join(ends)})",
        f"{row.deepest_dip_mean:.2f} ({row.deepest_dip_max:.2f})",
        f"{decimal(row.ess_median, '.1f')} ({decimal(row.ess_low, '.1f')})",
        ", ".join(shown) or UNKNOWN,
    )


def _multiple(found: MedianRatio | None) -> str:
    if found is None:
        return UNKNOWN
    return f"{found.ratio:.2f} ({found.low:.2f} to {decimal(found.high, '.2f')})"


def _collapses(found: Proportion | None) -> str:
    if found is None:
        return UNKNOWN
    return f"{found.count} of {found.trials} ({found.low:.2f} to {found.high:.2f})"
