"""The alarm on real runs: it fires on a collapse, says why it acted, and is silent on health."""

from __future__ import annotations

from typing import Any

import pytest

from tests.observation.findings import alarm
from tests.observation.local_runs import Observation


@pytest.fixture(scope="module")
def found(observation: Observation) -> dict[str, Any]:
    return alarm(observation)


def test_a_healthy_run_raises_no_alert(found: dict[str, Any]) -> None:
    assert found["alerts_on_healthy"] == []


def test_what_the_run_went_through_is_alerted(found: dict[str, Any]) -> None:
    assert set(found["due"]) <= set(found["fired"])


def test_the_effective_rate_is_one_number_in_prometheus_and_journal(found: dict[str, Any]) -> None:
    assert found["effective_rate_agrees"]


def test_no_alert_outlives_the_run(found: dict[str, Any]) -> None:
    assert set(found["resolved"]) == set(found["fired"])


def test_the_admission_lag_is_tightened_within_two_steps_of_the_warning(
    found: dict[str, Any],
) -> None:
    assert found["critical_to_throttle_steps"] is not None
    assert found["critical_to_throttle_steps"] <= 2
    assert found["steps_trained_after_throttle_on_older"] <= 3


def test_event_condition_and_metric_say_why_it_was_tightened(found: dict[str, Any]) -> None:
    assert found["throttle_reason_visible"]


def test_the_run_recovers_what_it_had_learned(found: dict[str, Any]) -> None:
    assert found["recovered"]
