import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vcpo_rollout.environments.mathematics.judge import MAX_CHARACTERS, MathJudge


@pytest.fixture(scope="module")
def judge():
    return MathJudge()


def test_expressions_of_one_meaning_are_equal(judge):
    assert judge.is_equal(r"\frac{3}{4}", "0.75")
    assert not judge.is_equal(r"\frac{3}{4}", "0.76")


def test_it_can_be_asked_from_any_thread(judge):
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(judge.is_equal, ["2", "3", "4", "5"], ["4/2", "4", "8/2", "6"])
    assert list(verdicts) == [True, False, True, False]


def test_a_power_beyond_all_bounds_is_wrong_and_the_next_answer_is_judged(judge):
    assert not judge.is_equal("9", "9^{9^{9}}")
    assert judge.is_equal("9", "18/2")


def test_no_answer_in_time_is_wrong_and_a_new_process_takes_over():
    judge = MathJudge(limit_s=0.0)
    assert not judge.is_equal("9", "18/2")
    first = judge.process
    assert first.returncode is not None
    assert not judge.is_equal("9", "18/2")
    assert judge.process is not first


def test_a_process_that_died_is_replaced(judge):
    assert judge.is_equal("9", "18/2")
    judge.process.kill()
    judge.process.wait()
    assert judge.is_equal("9", "18/2")


def test_an_endless_expression_is_not_parsed(judge):
    assert not judge.is_equal("1", "1" + "+0" * MAX_CHARACTERS)


def test_without_math_verify_the_cure_is_named(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="install math-verify in the rollout image"):
        MathJudge().is_equal("9", "18/2")


def test_the_process_has_none_of_the_workers_keys(monkeypatch):
    monkeypatch.setenv("VCPO_WORKER_KEY", "secret")
    judge = MathJudge()
    assert judge.is_equal("1/2", "0.5")
    environment = Path(f"/proc/{judge.process.pid}/environ").read_bytes()
    assert b"VCPO" not in environment


PARENT = """
import time
from vcpo_rollout.environments.mathematics.judge import MathJudge
judge = MathJudge()
judge.is_equal("1", "2")
print(judge.process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_does_not_outlive_a_killed_worker(is_stopped):
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as worker:
        process = os.pidfd_open(int(worker.stdout.readline()))
        if is_stopped:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
        worker.kill()
    ended, _, _ = select.select([process], [], [], 60.0)
    if not ended:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)
    assert ended
