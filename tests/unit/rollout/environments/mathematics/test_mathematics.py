import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.rollout.environments.data_files import GSM8K, MATH
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.environments.mathematics.judge import MAX_CHARACTERS, MathJudge
from vcpo_rollout.environments.mathematics.tasks import Gsm8k, MathProblems


@pytest.fixture(scope="module")
def judge():
    return MathJudge()


def test_it_can_be_asked_from_any_thread(judge):
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(judge.is_equal, ["2", "3", "4", "5"], ["4/2", "4", "8/2", "6"])
    assert list(verdicts) == [True, False, True, False]


def test_a_power_beyond_all_bounds_is_wrong_and_the_next_answer_is_judged(judge):
    assert not judge.is_equal("9", "9^{9^{9}}")
    assert not judge.is_equal("1", "1" + "+0" * MAX_CHARACTERS)
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


@pytest.fixture(scope="module")
def gsm8k():
    return Gsm8k(seed=0, path=GSM8K)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("42", "14 days of 3 boats.\n#### 42", 1.0),
        ("42", "#### 42.0", 1.0),
        ("1250", "#### $1,250", 1.0),
        ("1250", r"It is \boxed{1,250}.", 1.0),
        ("-5", "<answer>-5</answer>", 1.0),
        ("2.25", r"\boxed{9/4}", 1.0),
        ("42", "#### **$42**", 1.0),
        ("42", "<think>#### 41</think> \\boxed{42\\text{ dollars}}", 1.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        pytest.param("42", "#### 41\nNo:\n#### 42", 1.0, id="the last mark counts"),
        pytest.param("42", "#### 42\nNo:\n#### 41", 0.0, id="even when it is wrong"),
        pytest.param("42", "The answer is 42.", 0.0, id="not marked"),
        pytest.param("42", "#### 420", 0.0, id="longer number"),
        pytest.param("42", "#### -42", 0.0, id="sign"),
        pytest.param("42", "#### ,", 0.0, id="no number"),
    ],
)
def test_the_reward_is_one_for_exactly_the_marked_number(gsm8k, answer, response, reward):
    assert gsm8k.reward(Prompt(text="how many?", answer=answer), response) == reward


def test_the_answer_is_the_number_at_the_end_of_the_solution(gsm8k):
    answers = {gsm8k.prompt(Split.TRAIN, index).answer for index in range(12)}
    assert answers >= {"42", "-5", "2.25"}


def test_the_prompt_shows_question_and_mark_and_never_the_solution(gsm8k):
    text = gsm8k.prompt(Split.TRAIN, 0).text
    assert text.endswith("give the number alone on the last line, after ####.")
    assert "<<" not in text
    plain = Gsm8k(seed=0, path=GSM8K, style="plain").prompt(Split.TRAIN, 0).text
    assert text.startswith(f"{plain}\n\n")


@pytest.fixture(scope="module")
def problems():
    return MathProblems(seed=0, path=MATH)


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        (r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", r"so \boxed{0.5}.", 1.0),
        (r"\frac{1}{2}", r"so \boxed{\frac{2}{4}}", 1.0),
        (r"2\sqrt{7}", r"\boxed{\sqrt{28}}", 1.0),
        ("(x-1)(x+1)", r"\boxed{x^2 - 1}", 1.0),
        ("7", r"<think>\boxed{6}</think> <answer>7</answer>", 1.0),
        pytest.param("7", r"\boxed{6} or rather \boxed{7}", 1.0, id="the last box counts"),
        pytest.param("7", r"\boxed{7} or rather \boxed{6}", 0.0, id="even when it is wrong"),
        pytest.param(r"\frac{1}{2}", r"\frac{1}{2}", 0.0, id="no box"),
        pytest.param(r"\frac{1}{2}", r"\boxed{\frac{1}{2}", 0.0, id="open box"),
        pytest.param("7", r"\boxed{\frac{}{\sqrt}}", 0.0, id="no mathematics"),
    ],
)
def test_the_reward_is_one_for_a_box_of_the_same_meaning(problems, answer, response, reward):
    assert problems.reward(Prompt(text="how much?", answer=answer), response) == reward


def test_the_answer_is_what_the_solution_boxes(problems):
    answers = {problems.prompt(Split.TRAIN, index).answer for index in range(11)}
    assert answers == {
        *(r"\frac{1}{2}", "7", "a^2+2ab+b^2", r"9\pi", "32", "2", "-1", "(x-1)(x+1)", "6"),
        *(r"\frac13", "120"),
    }
