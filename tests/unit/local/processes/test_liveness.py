"""The time since a process last responded, and when that is too long."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from tests.unit.local.processes.fake_processes import TIMEOUT_S, Clock
from vcpo.local.processes.child import ChildProcess, Liveness, answers_health_check, start_child
from vcpo.service.lifecycle import Ready, write_ready
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.server import WireServer


@pytest.fixture
def child(tmp_path) -> Iterator[ChildProcess]:
    child = start_child(
        "child",
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        log=tmp_path / "log",
        ready_file=tmp_path / "ready",
        environment={},
    )
    yield child
    child.close_stdin()
    child.process.wait(TIMEOUT_S)


@pytest.fixture
def liveness(clock: Clock) -> Liveness:
    return Liveness(startup_deadline_s=1800.0, clock=clock)


def serve_at(child: ChildProcess, port: int) -> None:
    write_ready(child.ready_file, Ready(pid=1, grpc_port=port, metrics_port=1))


def test_silence_counts_from_the_first_question_without_an_answer(liveness, child, clock):
    assert liveness.silent_s(child) == 0.0
    clock.now_s += 500.0  # a host that slept, or asks seldom
    liveness.record(child, answered=False)
    assert liveness.silent_s(child) == 0.0
    clock.now_s += 40.0
    liveness.record(child, answered=False)
    assert liveness.silent_s(child) == 40.0


def test_an_answer_ends_the_silence(liveness, child, clock):
    liveness.record(child, answered=False)
    clock.now_s += 40.0
    liveness.record(child, answered=True)
    assert liveness.silent_s(child) == 0.0


def test_who_loads_has_the_startup_deadline_and_who_serves_a_minute(liveness, child, clock):
    liveness.record(child, answered=False)
    clock.now_s += 1799.0
    assert not liveness.is_hung(child)
    serve_at(child, 1)
    # The time that it took to load does not count against it.
    liveness.record(child, answered=False)
    assert not liveness.is_hung(child)
    clock.now_s += 60.0
    assert liveness.is_hung(child)


def test_who_never_serves_is_hung_after_the_startup_deadline(liveness, child, clock):
    liveness.record(child, answered=False)
    clock.now_s += 1800.0
    assert liveness.is_hung(child)


def test_processes_that_ended_are_forgotten(liveness, child, clock):
    liveness.record(child, answered=False)
    clock.now_s += 100.0
    liveness.retain([child])
    assert liveness.silent_s(child) == 100.0
    liveness.retain([])
    assert liveness.silent_s(child) == 0.0


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    server = WireServer(keys={CallerRole.STEERING: "secret"})
    yield server
    await server.stop(0)


async def test_a_process_that_serves_answers_whatever_it_says_and_asks_for(server, child):
    serve_at(child, await server.start("127.0.0.1:0", [], serving=False))
    assert await answers_health_check(child, 5.0)


async def test_a_process_without_health_checks_answers_too(child):
    server = grpc.aio.server()
    serve_at(child, server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    assert await answers_health_check(child, 5.0)
    await server.stop(0)


async def test_a_process_that_is_gone_does_not_answer(server, child):
    serve_at(child, await server.start("127.0.0.1:0", []))
    await server.stop(0)
    assert not await answers_health_check(child, 5.0)


async def test_a_process_that_does_not_serve_yet_does_not_answer(child):
    assert not await answers_health_check(child, 5.0)
