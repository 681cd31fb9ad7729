"""Which alerts fired when, and what Prometheus had scraped by then.

Prometheus writes the series `ALERTS` at each evaluation.
"""

from __future__ import annotations

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
