"""The control service over a real channel: a throttle is told to people, with its reason."""

from __future__ import annotations

import pytest_asyncio

from tests.fixtures.learner.dispatcher import dispatcher_fixture
from tests.fixtures.rollout.worker import serve_services
from vcpo.learner_control import LearnerControl
from vcpo.wire.v1 import control_pb2_grpc
from vcpo_learner.services.control import ControlService
from vcpo_learner.telemetry.signals import SignalWindow


class Parts:
    """A served control service of a run with a lag limit of 8, and the events that it wrote."""

    def __init__(self) -> None:
        fixture = dispatcher_fixture(algorithm={"maxPolicyLagSteps": 8})
        self.events: list[tuple[str, str]] = []
        signals = SignalWindow(
            batch_trajectories=4,
            dispatcher=fixture.dispatcher,
            clock=fixture.clock,
        )
        self.service = ControlService(
            dispatcher=fixture.dispatcher,
            signals=signals,
            drain=lambda reason: None,
            event=lambda kind, message: self.events.append((kind, message)),
        )


@pytest_asyncio.fixture
async def served():
    parts = Parts()

    def add(server):
        control_pb2_grpc.add_ControlServiceServicer_to_server(parts.service, server)

    async with serve_services(add) as channel:
        yield parts, LearnerControl(channel)


async def test_a_throttle_and_its_end_are_events_with_their_reasons(served):
    parts, control = served
    await control.throttle(4, "the ESS ratio is 5.0% of the on-policy ratio")
    await control.throttle(5, "the ESS ratio is 91.0% of the on-policy ratio")
    assert parts.events == [
        (
            "Throttled",
            "Lag limit 8 -> 4 versions: the ESS ratio is 5.0% of the on-policy ratio.",
        ),
        (
            "Relaxed",
            "Lag limit 4 -> 5 versions: the ESS ratio is 91.0% of the on-policy ratio.",
        ),
    ]
    assert (await control.poll()).lag_limit_steps == 5


async def test_a_limit_that_stays_is_no_event(served):
    parts, control = served
    await control.throttle(4, "because")
    await control.throttle(4, "because")
    await control.throttle(99, "")
    await control.throttle(12, "the bound of the spec is 8")
    assert parts.events == [
        ("Throttled", "Lag limit 8 -> 4 versions: because."),
        ("Relaxed", "Lag limit 4 -> 8 versions."),
    ]
