"""A failure of an environment is named by cause, exception, and the line of its author's code."""

import asyncio
import builtins
import importlib.util
import threading
from functools import partial

import numpy as np
import pytest
import torch

from tests.fixtures.rollout.worker import (
    FakeEnvironment,
    environment_threads,
    eventually,
    learner_fixture,
    run_in_task,
)
from vcpo.wire.failures import FailureCause
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines import chat_codec
from vcpo_rollout.generation.environment_pool import (
    EnvironmentFailedError,
    check_judgement,
    check_reward,
    environment_errors,
)
from vcpo_rollout.transport.learner_client import HeldPolicy, LeaseResult

TASK = """\
import json
from vcpo_rollout.environments import Prompt
from helpers_of_task import parsed

class Task:
    def prompt(self, split, index):
        return Prompt(text="2 + 2 = ", answer="not json")

    def reward(self, prompt, response):
        return parsed(prompt.answer)

class Untyped(Task):
    def prompt(self, split, index):
        return "2 + 2 = "

class Unable(Task):
    def prompt(self, split, index):
        raise LookupError(f"item {index}\\nis missing")

class Leaves(Task):
    def reward(self, prompt, response):
        raise SystemExit(3)
"""
HELPERS = """\
import json

def parsed(text):
    return json.loads(text)["score"]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A user's package of two files, as a module."""
    (tmp_path / "user_task.py").write_text(TASK)
    (tmp_path / "helpers_of_task.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("user_task", tmp_path / "user_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def report_with(environment):
    """The failure that the learner has counted after a worker has used this environment."""
    async with learner_fixture() as fixture:
        fixture.environment = environment
        fixture.publish(0)
        async with run_in_task(fixture.worker()):
            await eventually(lambda: fixture.dispatcher.failures.in_a_row >= 4)
        (failure,) = fixture.dispatcher.failures.counts
        assert fixture.count("vcpo_rollout_failures_total", cause=failure.latest.cause) >= 4
        assert fixture.ledger.counts().buffered == 0
        return failure.latest


@pytest.mark.parametrize(
    ("name", "cause", "said", "place"),
    [
        # The innermost line of the user's own files, not the one in json where it was raised.
        ("Task", "reward", "JSONDecodeError: Expecting value", "helpers_of_task.py:4"),
        ("Untyped", "type", "prompt must return a Prompt, got str '2 +", "user_task.py:13"),
        ("Unable", "prompt", "LookupError: item ", "user_task.py:18"),
        ("Leaves", "reward", "SystemExit: 3", "user_task.py:22"),
    ],
)
async def test_the_learner_receives_what_failed_and_where(task, tmp_path, name, cause, said, place):
    failure = await report_with(getattr(task, name)())
    assert failure.cause == cause
    assert said in failure.sentence
    assert failure.location == str(tmp_path / place)
    assert "\n" not in failure.sentence


async def test_every_exception_of_python_is_told_at_once_by_its_class():
    classes = (one for one in vars(builtins).values() if isinstance(one, type))
    threads = environment_threads(1, timeout_s=60.0)
    for kind in (one for one in classes if issubclass(one, BaseException)):
        parts = ("x", [ValueError()]) if issubclass(kind, BaseExceptionGroup) else ()
        error = kind.__new__(kind, *parts)
        with pytest.raises(EnvironmentFailedError) as caught:
            await threads.call(partial(raise_one, error))
        assert caught.value.failure.exception_type == type(error).__name__
    threads.close()


def raise_one(error: BaseException) -> None:
    with environment_errors(FailureCause.REWARD):
        raise error


async def test_a_call_that_waited_for_a_thread_has_its_whole_limit(monkeypatch):
    threads, entered, released = environment_threads(1, timeout_s=60.0), *events(2)
    wait, limits = asyncio.wait, []

    async def wait_until_it_began(futures, *, timeout):
        limits.append(timeout)
        if len(limits) == 2:
            released.set()
            return await wait(futures)
        await asyncio.to_thread(entered.wait)
        return set(), futures

    monkeypatch.setattr(asyncio, "wait", wait_until_it_began)
    assert await threads.call(lambda: entered.set() or released.wait()) is True
    assert limits[0] == 60.0
    assert 0.0 < limits[1] <= 60.0
    threads.close()


async def test_the_responses_of_a_group_are_judged_side_by_side():
    both = threading.Barrier(2, timeout=60)
    async with learner_fixture() as fixture:
        fixture.environment.reward_of = lambda: float(both.wait() >= 0)
        fixture.publish(0)
        async with run_in_task(fixture.worker(places=2)):
            await eventually(lambda: fixture.samples("accepted") >= 2)
    assert not both.broken


def test_the_codec_is_not_the_environments_code(task, tmp_path):
    source = "def encode(call):\n    with errors:\n        call()"
    codec = {"errors": environment_errors(FailureCause.PROMPT)}
    exec(compile(source, chat_codec.__file__, "exec"), codec)
    with pytest.raises(EnvironmentFailedError) as caught:
        codec["encode"](partial(task.Unable().prompt, "train", 0))
    assert caught.value.failure.location == f"{tmp_path / 'user_task.py'}:18"


async def test_a_call_that_does_not_return_is_a_failure_with_the_line_where_it_is(tmp_path):
    path = tmp_path / "stuck.py"
    path.write_text("def wait(event, entered):\n    entered.set() or event.wait()\n")
    spec = importlib.util.spec_from_file_location("stuck", path)
    stuck = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stuck)
    threads, released, entered = environment_threads(1, timeout_s=0.05), *events(2)
    try:
        call = asyncio.create_task(threads.call(partial(stuck.wait, released, entered)))
        await asyncio.sleep(0)
        assert entered.wait(60)  # blocks the event loop, hence the time limit passes later
        with pytest.raises(EnvironmentFailedError) as caught:
            await call
        assert caught.value.failure.cause is FailureCause.TIMEOUT
        assert caught.value.failure.location == f"{path}:2"
        assert "0.05 s (half of lease.timeoutSeconds)" in str(caught.value)
    finally:
        released.set()
        threads.close()


def events(count):
    return [threading.Event() for _ in range(count)]


@pytest.mark.parametrize(
    "reward",
    [1, True, 0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)],
    ids=["int", "bool", "float", "numpy", "array", "tensor"],
)
def test_a_number_of_any_library_is_a_reward(reward):
    assert check_reward(reward, FakeEnvironment().reward) in {1.0, 0.5}


@pytest.mark.parametrize(
    "value",
    ["0.5", b"0.5", None, 1j, [1.0], torch.zeros(2)],
    ids=lambda one: type(one).__name__,
)
def test_what_is_no_number_is_no_reward(value):
    with pytest.raises(EnvironmentFailedError) as caught:
        check_reward(value, FakeEnvironment().reward)
    assert caught.value.failure.cause is FailureCause.TYPE


def test_the_sum_of_named_parts_is_the_reward():
    judged = check_judgement({"right": 1, "short": np.float32(0.25)}, FakeEnvironment().reward)
    assert (judged.reward, judged.parts) == (1.25, {"right": 1.0, "short": 0.25})
    assert check_judgement(0.5, FakeEnvironment().reward).parts == {}


def test_a_score_is_the_reward_and_what_stands_beside_it_is_shown():
    scored = {"score": 0.5, "acc": True, "pred": "42", "gap": float("nan"), "all": np.float32(2)}
    judged = check_judgement(scored, FakeEnvironment().reward)
    assert (judged.reward, judged.parts) == (0.5, {"acc": 1.0, "all": 2.0})
    assert check_judgement({"score": 2}, FakeEnvironment().reward).reward == 2.0


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ({}, FailureCause.TYPE),
        ({"": 1.0}, FailureCause.TYPE),
        ({3: 1.0}, FailureCause.TYPE),
        ({"\ud800": 1.0}, FailureCause.TYPE),
        ({str(number): 0.0 for number in range(17)}, FailureCause.TYPE),
        ({"right": "yes"}, FailureCause.TYPE),
        ({"score": "yes", "acc": 1.0}, FailureCause.TYPE),
        ({"score": float("nan"), "acc": 1.0}, FailureCause.NON_FINITE),
        ({"right": float("inf")}, FailureCause.NON_FINITE),
        ({"right": 1.7e308, "short": 1.7e308}, FailureCause.NON_FINITE),
    ],
)
def test_parts_that_are_no_reward_are_a_failure(value, cause):
    with pytest.raises(EnvironmentFailedError) as caught:
        check_judgement(value, FakeEnvironment().reward)
    assert caught.value.failure.cause is cause


class EndlessLeases:
    """A learner that grants a prompt to each request, and counts the failed ones."""

    def __init__(self):
        self.num_granted = 0
        self.num_failed = 0

    async def newest_policy(self, held, *, wait_s):
        await asyncio.Event().wait()

    async def lease(self, **request):
        lease = work_pb2.Lease(
            lease_id=str(self.num_granted), split=work_pb2.SPLIT_TRAIN, num_trajectories=2
        )
        self.num_granted += 1
        return LeaseResult(leases=(lease,), phase=RunPhase.RUNNING, retry_after_s=60)

    async def report_failure(self, lease_id, failure):
        self.num_failed += 1

    async def release_all(self):
        pass


async def test_a_worker_asks_less_and_less_often_while_nothing_works():
    async with learner_fixture() as fixture:
        fixture.environment.reward_of = lambda: {}["answer"]
        learner, waits = EndlessLeases(), []

        async def sleep(seconds):
            waits.append(seconds)
            await asyncio.sleep(0)

        worker = fixture.worker(learner=learner)
        worker.sleep = sleep
        worker.receiver.held = HeldPolicy(incarnation="now", policy_version=0)
        async with run_in_task(worker):
            await eventually(lambda: learner.num_failed >= 50)
    assert waits[:4] == [0.02, 0.04, 0.08, 0.16]
    assert max(waits) == 5.0
