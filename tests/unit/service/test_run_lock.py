"""One host and one learner use a run directory; the error names who holds it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vcpo.service.run_lock import LockHolder, RunLockedError, run_lock

HOLD = """
import sys
from pathlib import Path
from vcpo.service.run_lock import LockHolder, run_lock
with run_lock(Path(sys.argv[1]), LockHolder.LEARNER):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the learner's lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now_s = 0.0
        self.on_sleep = lambda: None

    def __call__(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s
        self.on_sleep()


def test_a_second_learner_is_reported_who_trains_where_since_when_and_what_to_do(holder, tmp_path):
    with pytest.raises(RunLockedError) as refused, run_lock(tmp_path, LockHolder.LEARNER):
        pass
    assert re.fullmatch(
        re.escape(
            f"{tmp_path}: another learner (process {holder.pid} on {socket.gethostname()}, since "
        )
        + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\) works on this run; wait until it ends, "
        + rf"stop it \(kill {holder.pid}\), or give another directory",
        str(refused.value),
    )


def test_a_host_and_a_learner_do_not_exclude_each_other(holder, tmp_path):
    with run_lock(tmp_path, LockHolder.HOST):
        assert holder.poll() is None


def test_the_lock_of_a_killed_process_is_taken_over(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert str(holder.pid) in (tmp_path / "learner.lock").read_text()
    with run_lock(tmp_path, LockHolder.LEARNER):
        assert f'"pid": {os.getpid()},' in (tmp_path / "learner.lock").read_text()


def test_one_who_is_patient_gets_the_lock_of_a_process_that_ends(holder, tmp_path):
    clock = Clock()

    def end():
        holder.kill()
        holder.wait()

    clock.on_sleep = end
    with run_lock(tmp_path, LockHolder.LEARNER, patience_s=9, clock=clock, sleep=clock.sleep):
        assert clock.now_s > 0


def test_patience_ends(holder, tmp_path):
    clock = Clock()
    patient = run_lock(tmp_path, LockHolder.LEARNER, patience_s=9, clock=clock, sleep=clock.sleep)
    with pytest.raises(RunLockedError), patient:
        pass
    assert clock.now_s == pytest.approx(9, abs=0.2)


def test_a_lock_that_was_released_can_be_taken_again(tmp_path):
    for _ in range(2):
        with run_lock(tmp_path / "new", LockHolder.HOST):
            pass


def test_a_holder_that_has_not_signed_yet_is_still_a_holder(holder, tmp_path):
    (tmp_path / "learner.lock").write_text("")
    expected = "another learner works on this run; wait until it ends, stop that process"
    with pytest.raises(RunLockedError, match=expected), run_lock(tmp_path, LockHolder.LEARNER):
        pass
