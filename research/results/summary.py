"""All numbers of a study: tuning, plane, claims, and the few that head its report."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from research.cells.records import CellRecord
from research.results.claims import ClaimRow, claim_rows
from research.results.gaps import Gap, gaps
from research.results.median_ratio import MedianRatio, median_ratio
from research.results.plane import PlanePoint, SafeRates, plane_points, safe_rates
from research.results.proportion import Proportion
from research.results.realised_ess import RealisedEss, realised_ess
from research.results.taken_rate import taken_rate
from research.results.tuning import (
    TunedRate,
    own_targets,
    synchronous_rates,
    synchronous_target,
    tuned_rates,
)
from research.study import StudyMethod, StudySpec, cell_spec
from vcpo.algo.ess.learning_rate import LearningRateRule
from vcpo.api.algorithm import NORM_BASELINES

COMMON_HEADLINE_LAG: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySummary:
    """The numbers of one study; empty parts are of cells that have not been run."""

    target: float | None
    """The synchronous target: accuracy that rates and methods are judged by."""
    tuned: Sequence[TunedRate]
    plane: Sequence[PlanePoint]
    safe: Sequence[SafeRates]
    claims: Sequence[ClaimRow]
    gaps: Sequence[Gap]
    """Between the study's subject and the other methods."""
    realised: Sequence[RealisedEss]
    """Of the study's subject."""

    def claim(self, method: str, lag: int) -> ClaimRow | None:
        """Return the claims' row of a method at a lag, or None."""
        found = (row for row in self.claims if (row.method, row.lag) == (method, lag))
        return next(found, None)

    def safe_decades(self, method: str, lag: int) -> float | None:
        """Return the width of a method's safe rates at a lag, or None."""
        found = (row.decades for row in self.safe if (row.method, row.lag) == (method, lag))
        return next(found, None)

    def steps_ratio(self, method: str, lag: int) -> MedianRatio | None:
        """Return a method's steps to the target at a lag over those at lag 0.

        None where a row is missing, a median is infinite, or the one at lag 0 is no step.
        """
        stale, synchronous = self.claim(method, lag), self.claim(method, 0)
        if stale is None or synchronous is None:
            return None
        return median_ratio(stale.steps_to_target_by_seed, synchronous.steps_to_target_by_seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A study's answer in a few numbers, at one lag; None where the study has no such cell.

    The others are the methods without variance control.
    """

    lag: int
    """Policy lag, in versions."""
    subject: str
    collapse: Proportion | None
    """Collapses of the subject at its synchronous rate."""
    most_collapsed_other: str | None
    most_other_collapse: Proportion | None
    """The highest share of collapses of another method."""
    safe_decades: float | None
    """Width of the subject's safe rates."""
    widest_other: str | None
    best_other_safe_decades: float | None
    """The widest safe rates of another method."""
    steps_ratio: MedianRatio | None
    """The subject's steps to the target over its steps at lag 0."""


def summarize(study: StudySpec, records: Sequence[CellRecord]) -> StudySummary:
    """Compute all numbers of a study from the records of its cells, in any order."""
    order = [method.name for method in study.methods]
    records = sorted(
        records, key=lambda at: (at.lag, order.index(at.method), at.learning_rate, at.seed)
    )
    tuning = [each for each in records if each.lag == 0 and each.seed in study.tuning_seeds]
    target, tuned = synchronous_target(tuning), tuned_rates(tuning)
    plane = _plane_records(study, records)
    realised = realised_ess(records, study.subject)
    if target is None:
        return StudySummary(
            target=None,
            tuned=(),
            plane=plane_points(plane),
            safe=(),
            claims=(),
            gaps=(),
            realised=realised,
        )
    claimed = claim_records(study, records, tuned)
    return StudySummary(
        target=target,
        tuned=tuned,
        plane=plane_points(plane),
        safe=safe_rates(
            _without_development(study, plane),
            study.learning_rates,
            target,
            own_targets=own_targets(tuning),
            taken_rate=functools.partial(_taken_rate, study),
        ),
        claims=claim_rows(claimed, target),
        gaps=gaps(_without_development(study, claimed), study.subject, target),
        realised=realised,
    )


def _without_development(study: StudySpec, records: Iterable[CellRecord]) -> list[CellRecord]:
    return [each for each in records if each.seed not in study.development_seeds]


def _taken_rate(study: StudySpec, record: CellRecord) -> float:
    spec = cell_spec(
        study,
        study.method(record.method),
        lag=record.lag,
        learning_rate=record.learning_rate,
        seed=record.seed,
    )
    return taken_rate(spec, record)


def claim_records(
    study: StudySpec, records: Iterable[CellRecord], tuned: Iterable[TunedRate]
) -> list[CellRecord]:
    """Return the records at the synchronous rates: of the claims, without claims of the plane.

    A method that `claims.methods` leaves out has those that the claims' seeds share with the plane.
    """
    rates = synchronous_rates(tuned)
    at_their_rates = [each for each in records if each.learning_rate == rates.get(each.method)]
    if (claims := study.claims) is None:
        return _plane_records(study, at_their_rates)
    return [each for each in at_their_rates if claims.has_seed(each.method, each.lag, each.seed)]


def has_variance_control(study: StudySpec, method: StudyMethod) -> bool:
    """Return whether a method weighs its baseline by gradient norms or scales its learning rate."""
    seed, rate = study.seeds[0], study.learning_rates[0]
    algorithm = cell_spec(study, method, lag=0, learning_rate=rate, seed=seed).algorithm
    config = algorithm.loss_config
    return (
        config.baseline in NORM_BASELINES or config.learning_rate_rule is not LearningRateRule.NONE
    )


def headline_lag(study: StudySpec) -> int:
    """Return the lag at which a study is judged: 32, or the largest of a study without it."""
    lags = {*study.lags, *(study.claims.lags if study.claims else ())}
    return COMMON_HEADLINE_LAG if COMMON_HEADLINE_LAG in lags else max(lags)


def headline(study: StudySpec, summary: StudySummary) -> Headline:
    """Return the headline of a study."""
    lag = headline_lag(study)
    others = [each.name for each in study.methods if not has_variance_control(study, each)]
    collapses = {
        row.method: row.collapse
        for row in summary.claims
        if row.lag == lag and row.method in others
    }
    widths = {
        row.method: row.decades for row in summary.safe if row.lag == lag and row.method in others
    }
    worst = max(collapses, key=lambda name: collapses[name].share, default=None)
    widest = max(widths, key=lambda name: widths[name], default=None)
    own = summary.claim(study.subject, lag)
    return Headline(
        lag=lag,
        subject=study.subject,
        collapse=None if own is None else own.collapse,
        most_collapsed_other=worst,
        most_other_collapse=None if worst is None else collapses[worst],
        safe_decades=summary.safe_decades(study.subject, lag),
        widest_other=widest,
        best_other_safe_decades=None if widest is None else widths[widest],
        steps_ratio=summary.steps_ratio(study.subject, lag),
    )


def _plane_records(study: StudySpec, records: Iterable[CellRecord]) -> list[CellRecord]:
    return [
        each
        for each in records
        if study.plane_has_seed(each.method, each.lag, each.seed)
        and each.learning_rate in study.learning_rates
    ]
