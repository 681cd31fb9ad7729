"""The learner of a local run through its restarts."""

from __future__ import annotations

import pytest

from tests.unit.local.processes.fake_processes import Clock, wait_for_end
from vcpo.control.run_limits import RunLimits
from vcpo.local.processes.fleet import Fleet, RunFailedError
from vcpo.local.processes.learner import LearnerEnd, LearnerProcess
from vcpo.service.lifecycle import DRAINED, Ready, write_ready


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


def test_a_failure_before_the_first_step_is_a_restart_like_any_other(fail):
    end = fail(step=0)
    assert not end.is_complete
    assert end.message.startswith("it ended with status 1: the reason (log: ")


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
