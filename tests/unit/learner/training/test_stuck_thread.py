"""A tensor thread that does not return: the learner says where it stands, and its process ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from tests.fixtures.learner.dispatcher import make_run, work_request
from vcpo.records.journal import read_events, read_metrics
from vcpo.service.crash import crash_cause
from vcpo.wire.phase import RunPhase
from vcpo_learner.redo_log.log import RedoLog
from vcpo_learner.training import tensor_thread
from vcpo_learner.training.tensor_thread import StuckWorkError, TensorThread, TensorWork

TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    monkeypatch.setattr(tensor_thread, "_LOOK_S", 0.001)


class Blockade:
    """Something that a thread never gets past, until the test is over."""

    def __init__(self):
        self._is_here = threading.Event()
        self._is_over = threading.Event()

    def never_returns(self, *_, **__):
        self._is_here.set()
        self._is_over.wait(TIMEOUT_S)

    async def is_reached(self, running):
        async with asyncio.timeout(TIMEOUT_S):
            while not self._is_here.is_set():
                assert not running.done(), running.result()
                await asyncio.sleep(0.001)

    def end(self):
        self._is_over.set()


@pytest.fixture
def blockade():
    made = Blockade()
    yield made
    made.end()


def block(learner, blockade, version):
    """Let the update of a version hang; return the seconds in which the process is to end."""
    begin = learner.update.begin

    def begin_or_hang(groups, *, policy_version):
        if policy_version == version:
            blockade.never_returns()
        return begin(groups, policy_version=policy_version)

    learner.update.begin = begin_or_hang
    return learner.ends_within_s


async def test_a_step_that_never_ends_ends_the_learner_with_the_place_where_it_stands(
    make_learner, blockade, tmp_path, caplog
):
    learner = make_learner()
    ends_within_s = block(learner, blockade, version=2)
    running = asyncio.create_task(learner.run())
    await blockade.is_reached(running)
    learner.clock.advance(120.0)  # two steps took no time on this clock: the shortest limit
    await asyncio.sleep(0.05)
    assert not running.done()
    learner.clock.advance(1.0)
    with pytest.raises(StuckWorkError, match="the gradient of a batch has not ended within 120 s"):
        await running
    assert ends_within_s == [60.0]
    (stuck,) = [one.message for one in read_events(tmp_path) if one.kind == "LearnerStuck"]
    assert "the longest of the last 2 took 0 s" in stuck
    assert "in never_returns" in caplog.text
    assert crash_cause(caplog.text).startswith("StuckWorkError: the tensor thread hangs")


async def test_the_next_process_goes_on_with_all_that_was_accepted(
    make_learner, blockade, tmp_path
):
    learner = make_learner()
    block(learner, blockade, version=2)
    running = asyncio.create_task(learner.run())
    await blockade.is_reached(running)
    accepted = learner.accepted()
    assert accepted >= 12
    learner.clock.advance(121.0)
    with pytest.raises(StuckWorkError):
        await running
    later = make_learner()
    later.training.resume()
    assert later.accepted() == accepted
    assert await later.run() is RunPhase.COMPLETE
    assert later.update.versions == [0, 1, 2]  # two of them redone from the log
    assert [step.consumed for step in read_metrics(tmp_path).steps] == [4, 8, 12]


async def test_a_learner_that_waits_for_responses_does_not_hang(make_learner):
    learner = make_learner()
    training = asyncio.create_task(learner.training.run(drain_s=0))
    assert await learner.dispatcher.lease(work_request(), wait_s=TIMEOUT_S)  # it is at work
    for _ in range(20):  # nothing of the start is on its way any more
        await learner.training._thread.run(TensorWork.STEP, lambda: None)
        await asyncio.sleep(0.005)
    for _ in range(20):
        learner.clock.advance(3600.0)
        await asyncio.sleep(0.005)
    assert not training.done()
    learner.drain()
    assert await training is RunPhase.DRAINING


def thread_of(clock, reported, **learner):
    spec = make_run(learner=learner, startupDeadlineSeconds=900).spec
    return TensorThread(spec, clock, reported.append)


@pytest.mark.parametrize(
    ("learner", "limit_s"),
    [({}, 900.0), ({"processes": 2, "collectiveTimeoutSeconds": 3600}, 3600.0 + 60.0)],
)
async def test_the_first_piece_of_a_kind_has_the_time_of_a_start_or_of_a_collective(
    make_learner, blockade, learner, limit_s
):
    clock, reported = make_learner().clock, []
    thread = thread_of(clock, reported, **learner)
    assert await thread.run(TensorWork.STEP, lambda: 7) == 7
    copying = asyncio.create_task(thread.run(TensorWork.CHECKPOINT, blockade.never_returns))
    await blockade.is_reached(copying)
    clock.advance(limit_s)
    await asyncio.sleep(0.02)
    assert not copying.done()
    clock.advance(1.0)
    with pytest.raises(StuckWorkError, match="the copy of a checkpoint"):
        await copying
    assert len(reported) == 1


async def test_an_error_of_the_work_is_raised_as_it_is(make_learner):
    reported = []
    thread = thread_of(make_learner().clock, reported)

    def fail():
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await thread.run(TensorWork.STEP, fail)
    thread.shutdown()
    assert not reported


PROCESS = """
import sys, threading
from vcpo_learner.training import tensor_thread
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.__main__ import main

def take_weights(self, precision):
    threading.Event().wait()  # for ever

PublishedState.take = take_weights
tensor_thread.LEAST_LIMIT_S = 0.5
raise SystemExit(main())
"""


def test_the_process_ends_although_its_thread_never_returns(tmp_path):
    run_file, run_dir = tmp_path / "run.yaml", tmp_path / "run"
    run_file.write_text(
        "metadata: {name: r}\nspec:\n  model: {name: examples/models/tiny}\n  steps: 1\n"
        "  environment: {name: sort_digits}\n  startupDeadlineSeconds: 1\n"
        "  sampling: {maxNewTokens: 8}\n"
    )
    run_dir.mkdir()
    listen = ("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", "--linger-seconds=0")
    ended = subprocess.run(
        [sys.executable, "-c", PROCESS, run_file, f"--run-dir={run_dir}", *listen],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "in take_weights" in ended.stderr
    assert crash_cause(ended.stderr).startswith(
        "StuckWorkError: the tensor thread hangs: the comparison of the weights with those"
        " published before has not ended within 1 s; none has ended since the start"
    )
    (stuck,) = [one.message for one in read_events(run_dir) if one.kind == "LearnerStuck"]
    assert stuck.startswith("the tensor thread hangs")
    log = RedoLog(run_dir, limit_bytes=1 << 20)  # whole, and held by nobody
    assert log.spec is not None
    log.close()
