"""The learner of a local run through its restarts."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from tests.unit.local.processes.fake_processes import TIMEOUT_S, Clock, wait_for_end
from vcpo.control.run_limits import RunLimits
from vcpo.local.processes.child import ChildProcess, Liveness, answers_health_check, start_child
from vcpo.local.processes.fleet import Fleet, RunFailedError
from vcpo.local.processes.learner import LearnerEnd, LearnerProcess
from vcpo.service.lifecycle import DRAINED, Ready, write_ready
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.server import WireServer


@pytest.fixture
def learner(fleet: Fleet, clock: Clock) -> LearnerProcess:
    limits = RunLimits(pending_s=None, startup_s=1800, active_s=None, max_learner_restarts=2)
    return LearnerProcess(fleet, resume=False, limits=limits, clock=clock)


@pytest.fixture
def fail(learner, clock, monkeypatch):
    """Starts the learner when it is due and has it end with a status after some steps."""

    def start_and_end(*, step: int, status: int = 1) -> LearnerEnd | None:
        clock.now_s += 60.0
        monkeypatch.setenv("EXIT", str(status))
        learner.start_when_due(0)
        assert learner.ranks
        wait_for_end(learner.ranks[0])
        return learner.take_end(step=step)

    return start_and_end


def test_a_learner_that_ends_with_the_run_completes_it(fail):
    end = fail(step=300, status=0)
    assert (end.is_complete, end.message) == (True, "")


def test_a_learner_that_was_asked_to_leave_completes_nothing(fail):
    end = fail(step=20, status=DRAINED)
    assert not end.is_complete
    assert end.message == ("it was stopped from outside this run; restart 1 of 2 without progress")


def test_restarts_without_progress_end_the_run_with_the_cause(fail):
    fail(step=0)
    fail(step=0)
    expected = (
        r"^`spec\.failurePolicy\.maxLearnerRestarts`: the learner ended 3 times in a row without"
        r" progress; 2 restarts are allowed\. The last time it ended with status 1: the reason"
    )
    with pytest.raises(RunFailedError, match=expected):
        fail(step=0)


def test_progress_gives_the_restarts_back(fail):
    for step in (10, 20, 30, 40, 50):
        assert fail(step=step).message.endswith("restart 1 of 2 without progress")


def test_steps_taken_again_are_no_progress(fail):
    fail(step=60)
    fail(step=60)
    with pytest.raises(RunFailedError):
        fail(step=60)


def test_what_the_user_must_put_right_is_not_tried_again(fail):
    with pytest.raises(RunFailedError, match=r"^the learner cannot start: the reason"):
        fail(step=10, status=2)


def test_the_pause_before_a_restart_is_kept(learner, fail, clock):
    fail(step=0)
    end = fail(step=0)
    assert end.message.endswith("restart 2 of 2 without progress, in 1 s")
    learner.start_when_due(0)
    assert not learner.ranks
    clock.now_s += 1.0
    learner.start_when_due(0)
    assert learner.ranks


def test_an_end_is_reported_once(learner, fail):
    fail(step=0)
    assert learner.take_end(step=0) is None


def test_each_learner_is_found_ready_once(learner):
    learner.start_when_due(0)
    assert learner.take_ready() is None
    ready = Ready(pid=1, grpc_port=2, metrics_port=3)
    write_ready(learner.ranks[0].ready_file, ready)
    assert learner.take_ready() == ready
    assert learner.take_ready() is None


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
