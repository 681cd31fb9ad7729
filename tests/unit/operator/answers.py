"""Answers of Prometheus' query API, as a learner that was scraped would lead to them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Sample = tuple[str, dict[str, str], float, float]
"""Name, labels, Unix time, value."""

SCRAPED_S = 1_000.0

LEAST = {
    "vcpo_policy_version": 5.0,
    "vcpo_trajectories_buffered": 10.0,
    "vcpo_trajectories_in_flight": 11.0,
    "vcpo_batch_trajectories": 128.0,
    "vcpo_admission_lag_steps": 8.0,
    "vcpo_learner_idle_ratio": 0.25,
}
"""What every scrape of a learner holds besides its phase."""


def phases(current: str = "running", time_s: float = SCRAPED_S) -> list[Sample]:
    """The series of the phase."""
    known = ("running", "draining", "complete", "failed", "pondering")
    return [
        ("vcpo_learner_phase", {"phase": each}, time_s, float(each == current)) for each in known
    ]


def scrape(time_s: float = SCRAPED_S, *, phase: str = "running", **changes: Any) -> list[Sample]:
    """One scrape of a learner. changes: values by name; None leaves a series out."""
    values = {**LEAST, **changes}
    plain = [(name, {}, time_s, value) for name, value in values.items() if value is not None]
    return [*phases(phase, time_s), *plain]


def answer(samples: Iterable[Sample]) -> bytes:
    """The answer to a query with a range selector; samples of a series go together."""
    series: dict[str, dict[str, Any]] = {}
    for name, labels, time_s, value in samples:
        metric = {"__name__": name, "namespace": "ml", "run": "demo", **labels}
        found = series.setdefault(json.dumps(metric), {"metric": metric, "values": []})
        found["values"].append([time_s, str(value)])
    data = {"resultType": "matrix", "result": list(series.values())}
    return json.dumps({"status": "success", "data": data}).encode()
