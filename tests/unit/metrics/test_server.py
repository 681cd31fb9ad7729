"""A scrape over HTTP gives what the instruments hold, in the format of Prometheus."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.rules.promtool import needs_promtool, run_promtool
from vcpo.control.conditions import ConditionType, Reason, condition
from vcpo.metrics import HostMetrics, LearnerMetrics, RolloutMetrics, serve_metrics
from vcpo.metrics.hosted_runs import HostedRun, HostedRuns


def exercised_learner() -> LearnerMetrics:
    metrics = LearnerMetrics(run="countdown")
    metrics.last_step["vcpo_ess_ratio"].set(0.25)
    metrics.dropped.labels("stale").inc(2)
    metrics.step_duration_s.observe(0.3)
    return metrics


def exercised_rollout() -> RolloutMetrics:
    metrics = RolloutMetrics(run="countdown", group="main")
    metrics.samples.labels("accepted").inc()
    return metrics


def exercised_host() -> HostMetrics:
    metrics = HostMetrics()
    fresh = condition(ConditionType.SIGNALS_FRESH, Reason.FRESH)
    runs = HostedRuns(metrics)
    runs.show(("ml", "countdown"), HostedRun(conditions=(fresh,), lag_limit_steps=8))
    return metrics


def scrape(part: LearnerMetrics | RolloutMetrics | HostMetrics) -> str:
    with serve_metrics(part.registry, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.read().decode()


def values(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_gives_the_values_that_were_set():
    scraped = values(scrape(exercised_learner()))
    assert scraped["vcpo_ess_ratio"] == 0.25
    assert scraped["vcpo_trajectories_dropped_total"] == 2.0
    assert scraped["vcpo_learner_step_duration_seconds_count"] == 1.0


def test_a_scrape_holds_no_creation_times():
    assert not [name for name in values(scrape(exercised_learner())) if name.endswith("_created")]


def test_a_closed_server_has_given_its_port_back():
    server = serve_metrics(exercised_host().registry, "127.0.0.1", 0)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_a_taken_port_is_an_error():
    registry = exercised_host().registry
    with serve_metrics(registry, "127.0.0.1", 0) as server, pytest.raises(OSError, match="in use"):
        serve_metrics(registry, "127.0.0.1", server.port)


@needs_promtool
@pytest.mark.parametrize("part", [exercised_learner, exercised_rollout, exercised_host])
def test_promtool_finds_nothing_to_say(part):
    own = "\n".join(line for line in scrape(part()).splitlines() if "vcpo_" in line) + "\n"
    checked = run_promtool("check", "metrics", text=own)
    assert (checked.returncode, checked.stderr) == (0, "")
