"""Signals through a real Prometheus that scrapes a real endpoint of a learner."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.observation.prometheus_server import running_prometheus
from tests.fixtures.operator.runs import KEY
from vcpo.control.signals import RunSignals
from vcpo.metrics import LearnerMetrics, MetricsServer, RolloutMetrics, serve_metrics
from vcpo.wire.phase import RunPhase
from vcpo_operator.signals.client import LearnerConnections
from vcpo_operator.signals.prometheus import ScrapedSignals

POD = "demo-rollout-main-x"
PERIOD_S = 0.1
PATIENCE_S = 30.0
OLD_S = 2.5
"""More than the age of a target that is scraped every second."""
CONFIGURATION = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: learner
    static_configs: [{{targets: ["127.0.0.1:{learner}"], labels: {{namespace: ml}}}}]
  - job_name: rollout
    static_configs: [{{targets: ["127.0.0.1:{rollout}"], labels: {{namespace: ml, pod: {pod}}}}}]
"""


@dataclass
class PrometheusFixture:
    """A learner and a worker, a Prometheus that scrapes them, and the operator's source."""

    learner: LearnerMetrics
    endpoint: MetricsServer
    prometheus: subprocess.Popen[bytes]
    source: ScrapedSignals

    async def until(self, holds: Callable[[RunSignals], bool]) -> RunSignals:
        """The first signals of which something holds."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                signals = await self.source.fetch_signals(KEY, period_s=PERIOD_S)
                if signals is not None and holds(signals):
                    return signals
                await asyncio.sleep(PERIOD_S)


def set_step_metrics(metrics: LearnerMetrics) -> None:
    """Set what a learner sets that has taken a step."""
    for phase in RunPhase:
        metrics.phase.labels(phase.value).set(float(phase is RunPhase.RUNNING))
    metrics.step.set(7)
    metrics.policy_version.set(7)
    metrics.last_step["vcpo_on_policy_ess_ratio"].set(1.0)
    metrics.last_step["vcpo_ess_mean_ratio"].set(0.625)
    metrics.buffered.set(10)
    metrics.in_flight.set(11)
    metrics.batch_trajectories.set(128)
    metrics.lag_limit_steps.set(8)
    metrics.idle_ratio.set(0.25)
    metrics.workers.labels("main").set(1)


@pytest.fixture(name="fixture")
async def prometheus_fixture(tmp_path: Path) -> AsyncIterator[PrometheusFixture]:
    learner, worker = LearnerMetrics(run="demo"), RolloutMetrics(run="demo", group="main")
    set_step_metrics(learner)
    worker.in_flight.set(3)
    lines = LearnerConnections(clock=time.time, address_of=lambda key: "127.0.0.1:1")
    with (
        serve_metrics(learner.registry, "127.0.0.1", 0) as endpoint,
        serve_metrics(worker.registry, "127.0.0.1", 0) as workers,
    ):
        text = CONFIGURATION.format(learner=endpoint.port, rollout=workers.port, pod=POD)
        with running_prometheus(tmp_path, text) as (prometheus, port):
            url = f"http://127.0.0.1:{port}"
            source = ScrapedSignals(url=url, connections=lines, clock=time.time)
            yield PrometheusFixture(learner, endpoint, prometheus, source)
            await source.close()


# One test, since Prometheus takes up to 10 s to make its first scrape.
async def test_a_run_is_followed_to_its_end_through_the_end_of_its_target_and_of_prometheus(
    fixture: PrometheusFixture,
):
    signals = await fixture.until(lambda each: bool(each.workers))
    assert_shown(signals)

    fixture.learner.phase.labels("running").set(0.0)
    fixture.learner.phase.labels("complete").set(1.0)
    await fixture.until(lambda each: each.phase is RunPhase.COMPLETE)

    fixture.endpoint.close()
    aged = await fixture.until(lambda each: each.age_s > OLD_S)
    assert (aged.phase, aged.step, aged.is_fresh) == (RunPhase.COMPLETE, 7, False)

    fixture.prometheus.kill()
    held = await fixture.until(lambda each: each.age_s > aged.age_s)
    assert (held.phase, held.step, held.is_fresh) == (RunPhase.COMPLETE, 7, False)


def assert_shown(signals: RunSignals) -> None:
    assert (signals.step, signals.buffered, signals.in_flight) == (7, 10, 11)
    assert (signals.batch_trajectories, signals.lag_limit_steps) == (128, 8)
    assert (signals.relative_ess_ratio_mean, signals.relative_ess_ratio_low) == (0.625, None)
    assert (signals.learner_idle_ratio, signals.ready_workers) == (0.25, {"main": 1})
    assert signals.phase is RunPhase.RUNNING
    assert signals.workers[POD].in_flight == 3
