"""Signals through a real Prometheus that scrapes a real endpoint of a learner."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.fixtures.observation.prometheus_server import running_prometheus
from tests.fixtures.operator.runs import KEY
from tests.fixtures.signals import signals_message
from vcpo.control.signals import RunSignals
from vcpo.metrics import (
    LearnerMetrics,
    MetricsServer,
    RolloutMetrics,
    serve_metrics,
)
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.phase import RunPhase
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, work_pb2
from vcpo_operator.decisions.actions import Drain, Throttle
from vcpo_operator.observed.access import LearnerAccess
from vcpo_operator.signals.client import (
    LearnerCommandError,
    LearnerConnections,
    silence_cause,
)
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


def message(**changes: object) -> control_pb2.Signals:
    least = {"step": 4, "lag_limit_steps": 8, "phase": work_pb2.RUN_PHASE_RUNNING}
    return signals_message(**{**least, **changes})


class Learner(control_pb2_grpc.ControlServiceServicer):
    """Says one thing and notes what it is told."""

    def __init__(self) -> None:
        self.signals = message()
        self.asked = 0
        self.failure = ""
        self.lags: list[int] = []
        self.drains: list[str] = []

    async def GetSignals(self, request, context):  # noqa: N802 - gRPC's name
        self.asked += 1
        if self.failure:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self.failure)
        return self.signals

    async def SetThrottle(self, request, context):  # noqa: N802 - gRPC's name
        self.lags.append(request.lag_limit_steps)
        return control_pb2.SetThrottleResponse(lag_limit_steps=request.lag_limit_steps)

    async def Drain(self, request, context):  # noqa: N802 - gRPC's name
        self.drains.append(request.reason)
        return control_pb2.DrainResponse()


@dataclass
class ConnectionsFixture:
    learner: Learner
    server: grpc.aio.Server
    lines: LearnerConnections
    now_s: float = 100.0


@pytest.fixture(name="fixture")
async def connections_fixture() -> AsyncIterator[ConnectionsFixture]:
    learner, server = Learner(), grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(learner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    clock = lambda: fixture.now_s  # noqa: E731 - reads the fixture that is made next
    lines = LearnerConnections(clock=clock, address_of=lambda key: f"127.0.0.1:{port}")
    fixture = ConnectionsFixture(learner=learner, server=server, lines=lines)
    yield fixture
    await lines.close()
    await server.stop(0)


async def test_an_answer_is_of_this_moment(fixture: ConnectionsFixture):
    signals = await fixture.lines.fetch_signals(KEY, period_s=2.0)
    assert signals is not None
    assert (signals.step, signals.age_s) == (4, 0.0)


async def test_events_do_not_make_the_learner_answer_more_often(fixture: ConnectionsFixture):
    await fixture.lines.fetch_signals(KEY, period_s=2.0)
    fixture.now_s += 0.5
    signals = await fixture.lines.fetch_signals(KEY, period_s=2.0)
    assert fixture.learner.asked == 1
    assert signals is not None
    assert signals.age_s == 0.5


async def test_a_learner_that_falls_silent_leaves_what_it_said_last_and_its_age(
    fixture: ConnectionsFixture,
):
    await fixture.lines.fetch_signals(KEY, period_s=2.0)
    await fixture.server.stop(0)
    fixture.now_s += 30.0
    signals = await fixture.lines.fetch_signals(KEY, period_s=2.0)
    assert signals is not None
    assert (signals.age_s, signals.is_silent) == (30.0, True)


async def test_a_learner_that_falls_silent_is_logged_once_with_the_cause_and_so_is_its_return(
    fixture: ConnectionsFixture, caplog
):
    caplog.set_level(logging.INFO, logger="vcpo_operator")
    await fixture.lines.fetch_signals(KEY, period_s=0.0)
    fixture.learner.failure = "no room"
    for _ in range(3):
        await fixture.lines.fetch_signals(KEY, period_s=0.0)
    expected = "ml/demo: no signals from the learner: resource exhausted: no room"
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", expected)]
    fixture.learner.failure = ""
    for _ in range(2):
        await fixture.lines.fetch_signals(KEY, period_s=0.0)
    assert caplog.messages[1:] == ["ml/demo: the learner answers again"]


async def test_a_learner_that_starts_is_no_warning_until_it_has_had_a_minute(
    fixture: ConnectionsFixture, caplog
):
    await fixture.server.stop(0)
    for seconds in (0.0, 59.0):
        fixture.now_s = 100.0 + seconds
        assert await fixture.lines.fetch_signals(KEY, period_s=0.0) is None
    assert caplog.messages == []
    for fixture.now_s in (160.0, 162.0):
        await fixture.lines.fetch_signals(KEY, period_s=0.0)
    (message,) = caplog.messages
    assert message.startswith("ml/demo: no signals from the learner: unavailable: ")


async def test_without_a_period_a_learner_is_asked_at_every_reconciliation(
    fixture: ConnectionsFixture,
):
    await fixture.lines.fetch_signals(KEY, period_s=2.0)
    signals = await fixture.lines.fetch_signals(KEY, period_s=0.0)
    assert fixture.learner.asked == 2
    assert signals is not None
    assert signals.is_fresh


async def test_a_learner_that_never_answered_says_nothing(fixture: ConnectionsFixture):
    await fixture.server.stop(0)
    assert await fixture.lines.fetch_signals(KEY, period_s=2.0) is None


async def test_nonsense_counts_as_silence(fixture: ConnectionsFixture):
    fixture.learner.signals = message(learner_idle_ratio=7.0)
    assert await fixture.lines.fetch_signals(KEY, period_s=2.0) is None


async def test_a_learner_that_is_gone_is_forgotten(fixture: ConnectionsFixture):
    await fixture.lines.fetch_signals(KEY, period_s=2.0)
    await fixture.lines.disconnect(KEY)
    await fixture.server.stop(0)
    assert await fixture.lines.fetch_signals(KEY, period_s=2.0) is None


async def test_a_limit_reaches_the_learner(fixture: ConnectionsFixture):
    await fixture.lines.send(KEY, Throttle(lag_limit_steps=3, reason="because"))
    assert fixture.learner.lags == [3]


async def test_a_drain_reaches_the_learner_with_its_reason(fixture: ConnectionsFixture):
    await fixture.lines.send(KEY, Drain(reason="the run is suspended"))
    assert fixture.learner.drains == ["the run is suspended"]


async def test_an_order_that_nobody_takes_is_an_error(fixture: ConnectionsFixture):
    await fixture.server.stop(0)
    with pytest.raises(LearnerCommandError, match="took no Throttle"):
        await fixture.lines.send(KEY, Throttle(lag_limit_steps=3, reason="because"))


async def test_a_new_key_is_shown_at_once_and_a_wrong_one_is_reported_once(caplog):
    server = WireServer(keys={CallerRole.STEERING: "second"})
    control_pb2_grpc.add_ControlServiceServicer_to_server(Learner(), server.grpc_server)
    port = await server.start("127.0.0.1:0", ("vcpo.wire.v1.ControlService",))
    lines = LearnerConnections(clock=lambda: 100.0, address_of=lambda key: f"127.0.0.1:{port}")
    await lines.set_access(KEY, LearnerAccess(steering_key="first"))
    assert await lines.fetch_signals(KEY, period_s=0.0) is None
    assert await lines.fetch_signals(KEY, period_s=0.0) is None
    assert caplog.text.count("its pod is older than the Secret of keys") == 1
    assert "first" not in caplog.text
    await lines.set_access(KEY, LearnerAccess(steering_key="second"))
    signals = await lines.fetch_signals(KEY, period_s=0.0)
    assert signals is not None
    await lines.set_access(KEY, None)
    await lines.disconnect(KEY)
    await lines.fetch_signals(KEY, period_s=0.0)
    assert caplog.text.count("its pod is older than the Secret of keys") == 2
    await lines.close()
    await server.stop(0.0)


async def test_a_learner_that_cannot_be_reached_has_a_cause_until_it_answers(
    fixture: ConnectionsFixture,
):
    await fixture.lines.fetch_signals(KEY, period_s=0.0)
    assert fixture.lines.silence(KEY) is None
    fixture.learner.failure = "no room"
    await fixture.lines.fetch_signals(KEY, period_s=0.0)
    cause = fixture.lines.silence(KEY)
    assert cause is not None
    assert "no room" in cause.message


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Unreachable"),  # packets that a policy drops
        (grpc.StatusCode.UNAVAILABLE, "Unreachable"),
        (grpc.StatusCode.UNAUTHENTICATED, "KeyRefused"),
    ],
)
def test_what_a_status_alone_says_of_a_learner_that_cannot_be_reached(code, reason):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "timed out")
    assert silence_cause(error).reason == reason
