"""Reports over a real connection, of a learner that responds and of one that does not."""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from tests.fixtures.operator.runs import KEY
from tests.fixtures.signals import signals_message
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, work_pb2
from vcpo_operator.decisions.plan import Drain, Throttle
from vcpo_operator.observed.parse import LearnerAccess
from vcpo_operator.signals.client import LearnerCommandError, LearnerConnections, silence_cause


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

    async def ask(self, period_s: float = 2.0) -> Any:
        return await self.lines.fetch_signals(KEY, period_s=period_s)


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


async def test_events_do_not_make_the_learner_answer_more_often(fixture: ConnectionsFixture):
    await fixture.ask()
    fixture.now_s += 0.5
    signals = await fixture.ask()
    assert fixture.learner.asked == 1
    assert signals.age_s == 0.5


async def test_a_learner_that_falls_silent_leaves_what_it_said_last_and_its_age(
    fixture: ConnectionsFixture,
):
    await fixture.ask()
    await fixture.server.stop(0)
    fixture.now_s += 30.0
    signals = await fixture.ask()
    assert (signals.age_s, signals.is_silent) == (30.0, True)


async def test_a_learner_that_falls_silent_is_logged_once_with_the_cause_and_so_is_its_return(
    fixture: ConnectionsFixture, caplog
):
    caplog.set_level(logging.INFO, logger="vcpo_operator")
    await fixture.ask(0.0)
    fixture.learner.failure = "no room"
    for _ in range(3):
        await fixture.ask(0.0)
    expected = "ml/demo: no signals from the learner: resource exhausted: no room"
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", expected)]
    fixture.learner.failure = ""
    for _ in range(2):
        await fixture.ask(0.0)
    assert caplog.messages[1:] == ["ml/demo: the learner answers again"]


async def test_a_learner_that_starts_is_no_warning_until_it_has_had_a_minute(
    fixture: ConnectionsFixture, caplog
):
    await fixture.server.stop(0)
    for seconds in (0.0, 59.0):
        fixture.now_s = 100.0 + seconds
        assert await fixture.ask(0.0) is None
    assert caplog.messages == []
    for fixture.now_s in (160.0, 162.0):
        await fixture.ask(0.0)
    (message,) = caplog.messages
    assert message.startswith("ml/demo: no signals from the learner: unavailable: ")


async def test_without_a_period_a_learner_is_asked_at_every_reconciliation(
    fixture: ConnectionsFixture,
):
    await fixture.ask()
    signals = await fixture.ask(0.0)
    assert fixture.learner.asked == 2
    assert signals.is_fresh


async def test_nonsense_counts_as_silence(fixture: ConnectionsFixture):
    fixture.learner.signals = message(learner_idle_ratio=7.0)
    assert await fixture.ask() is None


async def test_a_learner_that_is_gone_is_forgotten(fixture: ConnectionsFixture):
    await fixture.ask()
    await fixture.lines.disconnect(KEY)
    await fixture.server.stop(0)
    assert await fixture.ask() is None


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
    await fixture.ask(0.0)
    assert fixture.lines.silence(KEY) is None
    fixture.learner.failure = "no room"
    await fixture.ask(0.0)
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
