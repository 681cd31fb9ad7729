"""Which alerts fired when, and what Prometheus had scraped by then.

Prometheus writes the series `ALERTS` at each evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fixtures.observation.prometheus_server import PrometheusServer


@dataclass(frozen=True, slots=True, kw_only=True)
class FiredAlert:
    """One alert over the time of a run."""

    name: str
    first_s: float
    """Unix time at which it first fired."""
    last_s: float
    """Unix time at which it last fired."""


def fired_alerts(server: PrometheusServer, start_s: float, end_s: float) -> list[FiredAlert]:
    """Alerts that fired in a time, each once, in order of their first firing."""
    found = server.query_range(
        'max by (alertname) (ALERTS{alertstate="firing"})', start_s, end_s, step_s=0.25
    )
    fired = [
        FiredAlert(
            name=series.labels["alertname"],
            first_s=series.points[0][0],
            last_s=series.points[-1][0],
        )
        for series in found
    ]
    return sorted(fired, key=lambda each: (each.first_s, each.name))


def early_firings_s(
    firings_s: Sequence[float],
    samples: Sequence[tuple[float, float]],
    *,
    threshold: float,
    window_s: float,
) -> list[float]:
    """Evaluations that fired though the window before them had no sample, or one below a threshold.

    firings_s: Unix times of evaluations at which the alert fired.
    samples: Unix time and value of what was scraped.
    """
    windows = {
        at_s: [value for time_s, value in samples if at_s - window_s < time_s <= at_s]
        for at_s in firings_s
    }
    return [at_s for at_s, values in windows.items() if min(values, default=-math.inf) < threshold]


def longest_above_s(samples: Sequence[tuple[float, float]], threshold: float) -> float:
    """The longest time between two samples with none below a threshold in between, in seconds.

    samples: Unix time and value of what was scraped.
    """
    longest_s, since_s = 0.0, None
    for time_s, value in samples:
        if value < threshold:
            since_s = None
            continue
        since_s = time_s if since_s is None else since_s
        longest_s = max(longest_s, time_s - since_s)
    return longest_s
