"""Rules, boards and metrics on real runs, as a real Prometheus scrapes and judges them."""

from __future__ import annotations

from tests.observation.findings import local_findings, missed_bars
from tests.observation.local_runs import Observation


def test_a_collapse_alerts_health_is_silent_and_every_panel_has_data(
    observation: Observation,
) -> None:
    found = local_findings(observation)
    assert missed_bars(found) == [], found
