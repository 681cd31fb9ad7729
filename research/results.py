"""The numbers of a study, computed from the records of its cells.

Final accuracy is the mean of the evaluations in the last quarter of a cell's steps. The target is
0.95 of the best mean final accuracy of any method and rate at lag 0, on the tuning seeds. The
synchronous rate of a method reaches the target in the fewest steps there; it stays as k grows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy.stats import binomtest, t

from research.cells.records import CellRecord
from research.measures import collapse_step, final_accuracy, has_collapsed, steps_to
from research.study import StudySpec

TARGET_SHARE: Final = 0.95
"""The target, as a share of the best synchronous accuracy."""
_RESAMPLES: Final = 4000
_MUCH: Final = 0.02


def cell_frame(records: Iterable[CellRecord]) -> pd.DataFrame:
    """Return a row for each cell: its place, final accuracy, median ESS and rate."""
    rows = [
        {
            "method": each.method,
            "lag": each.lag,
            "rate": each.learning_rate,
            "seed": each.seed,
            "cpu_s": each.cpu_s,
            "final": final_accuracy(each.evaluations),
            "fell": collapse_step(each.evaluations) is not None,
            "ess": _median(each.steps.ess[each.lag :]),
            "on_policy": _median(each.steps.on_policy_ess_ratio),
            "taken": _median((each.steps.learning_rate or ())[each.lag :]),
            "record": each,
        }
        for each in records
    ]
    columns = "method lag rate seed cpu_s final fell ess on_policy taken record"
    return pd.DataFrame(rows, columns=columns.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What the cells at lag 0, on seeds of their own, decide."""

    target: float
    rates: Mapping[str, float]
    """Synchronous rate by method."""


def tuning(study: StudySpec, cells: pd.DataFrame) -> Tuning | None:
    """Return the target and each method's synchronous rate; None without a cell of the tuning."""
    own = cells[(cells.lag == 0) & cells.seed.isin(study.tuning_seeds)]
    if own.empty:
        return None
    target = TARGET_SHARE * own.groupby(["method", "rate"]).final.mean().max()
    own = own.assign(steps=[steps_to(each.evaluations, target) for each in own.record])
    by_rate = own.groupby(["method", "rate"]).agg(
        steps=("steps", "median"), final=("final", "mean")
    )
    # Fewest steps; where none arrives, the highest accuracy; of equals, the lower rate.
    by_rate["score"] = np.where(np.isinf(by_rate.steps), -by_rate.final, 0.0)
    order = by_rate.reset_index().sort_values(["steps", "score", "rate"])
    rates = order.groupby("method").rate.first()
    return Tuning(target=float(target), rates={str(name): float(at) for name, at in rates.items()})


def claimed_cells(study: StudySpec, cells: pd.DataFrame, tuned: Tuning) -> pd.DataFrame:
    """Return the cells at the synchronous rates, on the seeds of the claims or of the plane."""
    own = cells[cells.rate == cells.method.map(tuned.rates)]
    has_seed = study.plane_has_seed if study.claims is None else study.claims.has_seed
    places = zip(own.method, own.lag, own.seed, strict=True)
    return own[[has_seed(*place) for place in places]]


def by_lag(study: StudySpec, cells: pd.DataFrame, tuned: Tuning) -> pd.DataFrame:
    """Return a row for each method and lag, at the synchronous rate.

    Columns: final accuracy (mean, std, lowest, highest), cells and collapses with their exact
    interval of 95 %, steps over those at lag 0 with a bootstrap interval, what the study's subject
    gains over the method on the same seeds, and what the method loses to its own cells at lag 0,
    with intervals of 95 % (Student's t), and on how many seeds that is more than `_MUCH`.
    """
    claimed = claimed_cells(study, cells, tuned)
    subject = claimed[claimed.method == study.subject].set_index(["lag", "seed"]).final
    subject = subject.drop(list(study.development_seeds), level="seed", errors="ignore")
    fresh = claimed[claimed.lag == 0].set_index(["method", "seed"]).final
    steps = {
        place: [steps_to(each.evaluations, tuned.target) for each in own.record]
        for place, own in claimed.groupby(["method", "lag"])
    }
    rows = []
    for (method, lag), own in claimed.groupby(["method", "lag"]):
        collapses = sum(has_collapsed(each.evaluations, tuned.target) for each in own.record)
        low, high = exact_interval(collapses, len(own))
        ratio = median_ratio(steps[method, lag], steps.get((method, 0), []))
        by_seed = own.set_index("seed").final
        gain = subject.xs(lag, level="lag") - by_seed
        lost = (fresh.get(method, by_seed * math.nan) - by_seed).dropna()
        rows.append(
            {
                "method": method,
                "lag": lag,
                "rate": tuned.rates[str(method)],
                "cells": len(own),
                "final": own.final.mean(),
                "std": own.final.std() if len(own) > 1 else 0.0,
                "lowest": own.final.min(),
                "highest": own.final.max(),
                "collapses": collapses,
                "collapse_low": low,
                "collapse_high": high,
                **dict(zip(("steps_ratio", "steps_low", "steps_high"), ratio, strict=True)),
                **_paired("gain", gain.dropna()),
                **_paired("lost", lost),
                "lost_much": int((lost > _MUCH).sum()),
            }
        )
    return _in_order(study, pd.DataFrame(rows))


def plane(study: StudySpec, cells: pd.DataFrame) -> pd.DataFrame:
    """Return mean final accuracy by method, lag (rows) and learning rate (columns)."""
    own = cells[cells.rate.isin(study.learning_rates)]
    places = zip(own.method, own.lag, own.seed, strict=True)
    own = own[[study.plane_has_seed(*place) for place in places]]
    return own.pivot_table(index=["method", "lag"], columns="rate", values="final")


def safe_rates(study: StudySpec, cells: pd.DataFrame, target: float) -> pd.DataFrame:
    """Return the widest range of rates whose mean accuracy reaches the target, by method and lag.

    Seeds on which settings were chosen are left out. Columns: low, high, decades, and whether the
    range reaches an end of the rates that were tried, and so may be wider.
    """
    whole = plane(study, cells[~cells.seed.isin(study.development_seeds)]).dropna()
    rows = [(*at, *safe_range(curve.sort_index(), target)) for at, curve in whole.iterrows()]
    found = pd.DataFrame(rows, columns=["method", "lag", "low", "high", "is_cut"])
    found.insert(4, "decades", [math.log10(row.high / row.low) for row in found.itertuples()])
    return _in_order(study, found)


def safe_range(curve: pd.Series, target: float) -> tuple[float, float, bool]:
    """Return the ends of the widest range of rates at which the accuracy is at least a target.

    curve: accuracy by rising learning rate; between two rates it is linear in the logarithm of the
    rate. Returns also whether the range reaches an end of the curve. Without a safe rate both ends
    are 1.
    """
    rates = np.log10(curve.index.to_numpy(dtype=float))
    found, last = [(0.0, 0.0, False)], len(curve) - 1
    for is_safe, inside in groupby(range(len(curve)), lambda at: curve.iloc[at] >= target):
        if is_safe:
            indices = list(inside)
            first, end = indices[0], indices[-1]
            low = _crossing(rates, curve, first - 1, target) if first else rates[0]
            high = _crossing(rates, curve, end, target) if end < last else rates[last]
            found.append((low, high, first == 0 or end == last))
    low, high, is_cut = max(found, key=lambda each: each[1] - each[0])
    return 10.0**low, 10.0**high, is_cut


def conditions(study: StudySpec, cells: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each method, lag and rate of a study without a tuning.

    The interval is the exact one of an accuracy on so many held-out prompts; it does not hold the
    scatter of seeds. `kept` is the accuracy over the same method's without lag.
    """
    trials = study.run.evaluation.prompts * study.run.evaluation.samples_per_prompt
    rows = cells.groupby(["method", "lag", "rate"], as_index=False).agg(
        cells=("seed", "size"),
        final=("final", "mean"),
        collapses=("fell", "sum"),
        ess=("ess", "median"),
        on_policy=("on_policy", "median"),
        taken=("taken", "median"),
    )
    ends = [exact_interval(round(final * trials), trials) for final in rows.final]
    rows["low"], rows["high"] = zip(*ends, strict=True) if ends else ((), ())
    fresh = rows[rows.lag == 0].set_index(["method", "rate"]).final
    places = zip(rows.method, rows.rate, rows.lag, rows.final, strict=True)
    rows["kept"] = [
        final / fresh.get((method, rate), math.nan) if lag else math.nan
        for method, rate, lag, final in places
    ]
    return _in_order(study, rows)


def exact_interval(count: int, trials: int) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of 95 % of a share of trials."""
    ends = binomtest(count, trials).proportion_ci(0.95)
    return float(ends.low), float(ends.high)


def median_ratio(
    values: Sequence[float], references: Sequence[float]
) -> tuple[float, float, float]:
    """Return the median of values over that of references, with a bootstrap interval of 95 %.

    An infinite value stands for a seed that never arrives. NaN if a median is infinite, or the
    references' is no step. Always the same resamples are drawn.
    Source: Efron 1979, Annals of Statistics 7(1); the percentile interval.
    """
    above, below = np.array(values, dtype=float), np.array(references, dtype=float)
    if not len(below) or not math.isfinite(np.median(above)) or not 0 < np.median(below) < math.inf:
        return math.nan, math.nan, math.nan
    draws = np.random.default_rng(0)
    tops = np.median(draws.choice(above, (_RESAMPLES, len(above))), axis=1)
    bottoms = np.median(draws.choice(below, (_RESAMPLES, len(below))), axis=1)
    is_infinite = np.isinf(tops) | (bottoms == 0.0)
    ratios = np.divide(tops, bottoms, out=np.full(_RESAMPLES, math.inf), where=~is_infinite)
    low, high = np.quantile(ratios, (0.025, 0.975), method="nearest")
    return float(np.median(above) / np.median(below)), float(low), float(high)


def _paired(name: str, gains: pd.Series) -> dict[str, float]:
    """Return the mean of paired differences and its interval of 95 %; NaN without enough pairs."""
    pairs, mean, reach = len(gains), gains.mean(), math.nan
    if pairs > 1:
        reach = t.ppf(0.975, pairs - 1) * gains.std() / math.sqrt(pairs)
    ends = {f"{name}_low": mean - reach, f"{name}_high": mean + reach}
    return {name: mean, **ends, f"{name}_pairs": pairs}


def _crossing(rates: Any, curve: pd.Series, before: int, target: float) -> float:
    one, other = curve.iloc[before], curve.iloc[before + 1]
    share = (target - one) / (other - one)
    return float(rates[before] + share * (rates[before + 1] - rates[before]))


def _median(values: Sequence[float | None]) -> float:
    known = [each for each in values if each is not None]
    return float(np.median(known)) if known else math.nan


def _in_order(study: StudySpec, rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows by lag, and then in the order of the study's methods."""
    if rows.empty:
        return rows
    order = [each.name for each in study.methods]
    places = rows.method.map(order.index)
    return rows.assign(place=places).sort_values(["lag", "place"]).drop(columns="place")
