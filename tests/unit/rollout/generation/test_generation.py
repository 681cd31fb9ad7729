import asyncio
import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio

from tests.fixtures.rollout.worker import (
    FakeEnvironment,
    environment_threads,
    eventually,
    learner_fixture,
    run_in_task,
)
from vcpo.api import VCPORun, parse_run
from vcpo.api.workloads import Environment as EnvironmentSettings
from vcpo.service.lifecycle import StartError
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.generation.environment_pool import (
    THREAD_NAME,
    EnvironmentFailedError,
    HungCallsError,
)
from vcpo_rollout.generation.rewards import make_task
from vcpo_rollout.trial import NotTriedError, try_environment

PROMPT = Prompt(text="?", answer="312")


def exact(prompt: Prompt, response: str) -> float:
    return float(response == prompt.answer)


def short(prompt: Prompt, response: str, *, most: int = 5) -> dict[str, float]:
    return {"length": float(len(response) <= most), "empty": float(not response)}


class Counted:
    """Counts what it has judged."""

    def __init__(self, *, start: int) -> None:
        if start < 0:
            raise ValueError("start: is negative")
        self.count = start

    def __call__(self, prompt: Prompt, response: str) -> int:
        self.count += 1
        return self.count


class Silent:
    pass


LOOPS = []


async def slow(prompt: Prompt, response: str) -> float | None:
    LOOPS.append(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return float(prompt.text) if prompt.text.isdigit() else None


def absent(prompt: Prompt, response: str) -> None: ...


def task(*rewards: Any, name: str = "sort_digits", **parameters: Any) -> Any:
    document = {"name": name, "parameters": parameters, "rewards": rewards}
    return make_task(EnvironmentSettings.model_validate(document), 7)


def own(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": f"{__name__}:{name}", **settings}


def test_a_run_without_functions_is_judged_by_its_environment():
    assert type(task()).__name__ == "SortDigits"


def test_the_prompts_stay_those_of_the_environment():
    assert task(own("exact")).prompt(Split.TRAIN, 3) == task().prompt(Split.TRAIN, 3)


def test_each_function_is_a_part_of_the_reward_times_its_weight():
    judged = task(
        own("exact", weight=2.0),
        own("short", weight=0.5, parameters={"most": 2}),
        {"name": "environment", "weight": 4.0},
    )
    assert judged.reward(PROMPT, "312") == {
        "exact": 2.0,
        "short.length": 0.0,
        "short.empty": 0.0,
        "environment": 4 * task().reward(PROMPT, "312"),
        "score": 2.0 + 4 * task().reward(PROMPT, "312"),
    }


def score(prompt, response):
    """A function as of verl."""
    return {"score": 1.0, "acc": True, "pred": response}


def test_the_score_of_a_function_is_its_reward_and_its_extras_are_shown():
    judged = task(own("score", weight=2.0), own("exact"))
    assert judged.reward(PROMPT, "312") == {"score 1.acc": 2.0, "exact": 1.0, "score": 3.0}


def test_a_function_that_is_named_twice_gives_two_parts():
    judged = task(own("exact"), own("exact", weight=3))
    assert judged.reward(PROMPT, "312") == {"exact": 1.0, "exact 2": 3.0, "score": 4.0}


def test_a_class_is_made_once_with_its_parameters():
    judged = task(own("Counted", parameters={"start": 5}))
    assert [judged.reward(PROMPT, "") for _ in range(2)] == [
        {"Counted": worth, "score": worth} for worth in (6.0, 7.0)
    ]


def test_async_functions_are_awaited_on_one_loop_and_one_that_returns_none_is_left_out():
    judged = task(own("slow", weight=3), own("exact"), own("absent"))
    numbered = Prompt(text="2", answer="312")
    assert judged.reward(numbered, "312") == {"slow": 6.0, "exact": 1.0, "score": 7.0}
    assert judged.reward(PROMPT, "") == {"exact": 0.0, "score": 0.0}
    assert len(set(LOOPS)) == 1
    with pytest.raises(EnvironmentFailedError, match="absent must return a number, got None"):
        task(own("absent")).reward(PROMPT, "312")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"name": "no_such:judge"}, r"name: 'no_such:judge' cannot be imported .*beside the run's"),
        (own("exakt"), r"name: .*exakt' cannot be imported \(AttributeError"),
        (own("PROMPT"), r"name: .*PROMPT' is neither a function nor a class with `__call__`"),
        (own("Silent"), r"name: .*Silent' is neither a function nor a class with `__call__`"),
        (own("Counted"), r"parameters: .*Counted' cannot be made with {} .*missing 1 required"),
        (own("Counted", parameters={"start": -1}), r"parameters: .*start: is negative"),
    ],
)
def test_a_function_that_cannot_judge_is_named_with_the_cure(reward, said):
    with pytest.raises(ValueError, match=rf"^environment\.rewards\[1\]\.{said}"):
        task(own("exact"), reward)


def test_a_conversation_judges_itself():
    with pytest.raises(ValueError, match=r"^environment.rewards: '.*Calculator' has multi-turn"):
        task(own("exact"), name="examples.plugins.calculator.calculator:Calculator")


class Blocking(FakeEnvironment):
    """Makes no prompt before it is released."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()
        self.waiting = 0

    def prompt(self, split, index):
        self.waiting += 1
        self.released.wait()
        return super().prompt(split, index)


@pytest_asyncio.fixture
async def fixture():
    """A learner, and a loop with a single thread for everything that is not an environment's."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    async with learner_fixture() as fixture:
        fixture.environment = Blocking()
        yield fixture
        fixture.environment.released.set()


def threads_of_environments():
    return [one for one in threading.enumerate() if one.name.startswith(THREAD_NAME)]


async def test_weights_arrive_while_every_environment_blocks(fixture):
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=8)):
        await eventually(lambda: fixture.environment.waiting == 4)  # prompts of two responses each
        fixture.publish(1)
        await eventually(lambda: fixture.engine.swapped == [0, 1])
        assert await asyncio.to_thread(lambda: "free") == "free"
        assert fixture.environment.waiting == 4
        fixture.environment.released.set()
        # At version 1, the worker may go on to 12.
        await eventually(lambda: fixture.samples("accepted") >= 8)


async def test_a_worker_that_stops_waits_for_no_environment_and_leaves_no_thread(fixture):
    before = set(threads_of_environments())
    fixture.publish(0)
    async with run_in_task(fixture.worker(places=4, drain_s=0.01)):
        await eventually(lambda: fixture.environment.waiting == 2)
    assert len(set(threads_of_environments()) - before) == 2
    fixture.environment.released.set()
    await eventually(lambda: not set(threads_of_environments()) - before)


SHORT_S = 0.02
"""Time of a call of the environment, in tests whose calls hang."""


class Hangs:
    """Hangs in its first calls, until it is released."""

    def __init__(self, times):
        self.left = times
        self.released = threading.Event()

    def __call__(self):
        self.left -= 1
        if self.left >= 0:
            self.released.wait()


async def hang(threads, hangs, times):
    """Make calls that do not return in time, side by side."""
    calls = (threads.call(hangs) for _ in range(times))
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {EnvironmentFailedError}


@pytest.fixture
def hangs():
    hangs = Hangs(1000)
    yield hangs
    hangs.released.set()


async def test_calls_that_hang_take_no_thread_from_the_others(hangs):
    threads = environment_threads(2, timeout_s=SHORT_S)
    await hang(threads, hangs, 2)
    assert await threads.call(lambda: "fine") == "fine"
    threads.check()
    threads.close()


async def test_a_call_that_was_cancelled_counts_once_its_time_is_over(hangs):
    threads = environment_threads(1, timeout_s=SHORT_S)
    calls = [asyncio.create_task(threads.call(hangs)) for _ in range(2)]
    await eventually(lambda: hangs.left == 998)
    for call in calls:
        call.cancel()
    await eventually(lambda: has_ended(threads))
    threads.close()


async def test_too_many_hung_calls_end_the_process_until_they_return(hangs):
    threads = environment_threads(2, timeout_s=SHORT_S)
    await hang(threads, hangs, 3)
    with pytest.raises(HungCallsError, match=r"3 calls have not returned after 0\.02 s"):
        threads.check()
    hangs.released.set()
    await eventually(lambda: not has_ended(threads))
    threads.close()


def has_ended(threads):
    try:
        threads.check()
    except HungCallsError:
        return True
    return False


def hanging_task(hangs):
    """A task whose reward hangs in its first calls."""
    task = FakeEnvironment()
    task.reward_of = lambda: hangs() or 1.0
    return task


async def test_a_worker_that_is_worn_out_ends_with_the_cause():
    hangs = Hangs(6)
    async with learner_fixture(failurePolicy={"maxFailuresInARow": 1000}) as fixture:
        fixture.environment = hanging_task(hangs)
        fixture.publish(0)
        worker = fixture.worker(places=2, drain_s=0.0, environment_timeout_s=SHORT_S)
        try:
            with pytest.raises(HungCallsError, match="calls have not returned"):
                await worker.run()
            assert fixture.count("vcpo_rollout_environment_hung_calls") >= 3
        finally:
            hangs.released.set()


HEAD = """
from vcpo_rollout.environments import Prompt
import itertools, socket, threading

calls = itertools.count()

class Task:
    def __init__(self, *, seed, **settings): {init}
    def prompt(self, split, index): {prompt}
    def reward(self, prompt, response): {reward}
"""
GOOD = {"init": "...", "prompt": "return Prompt(text=f'{index}', answer='')", "reward": "return 1"}
TURNS = """
class Talk:
    def next_turn(self, response): {reply}
    def reward(self): {judge}

class Turns(Task):
    def converse(self, prompt): {converse}
"""
GOOD_TURNS = {"reply": "return 'go on'", "judge": "return 0.5", "converse": "return Talk()"}


@pytest.fixture
def write(tmp_path, monkeypatch, request):
    """Write a module with a task, good but for what is given; return its name."""
    name = f"task_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(**bodies: str) -> str:
        text = HEAD.format(**{key: bodies.get(key, body) for key, body in GOOD.items()})
        text += TURNS.format(**{key: bodies.get(key, body) for key, body in GOOD_TURNS.items()})
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    sys.modules.pop(name, None)


def run_of(environment: str, *, lease_s: int = 600, **settings: object) -> VCPORun:
    task = json.dumps({"name": environment, **settings})
    lease = f"lease: {{timeoutSeconds: {lease_s}}}"
    return parse_run(
        "metadata: {name: r}\n"
        f"spec: {{model: {{name: m}}, environment: {task}, steps: 1, {lease}}}"
    )


async def refusal_of(environment: str, *, lease_s: int = 600, **settings: object) -> str:
    with pytest.raises(StartError) as refused:
        await try_environment(run_of(environment, lease_s=lease_s, **settings))
    return str(refused.value)


async def test_a_good_environment_needs_no_word(write):
    module = write()
    assert await try_environment(run_of(f"{module}:Task")) == ()
    assert await try_environment(run_of(f"{module}:Turns")) == ()


async def test_repeated_rows_and_repeated_prompts_of_an_evaluation_are_told(write, tmp_path):
    module = write(prompt="return Prompt(text=f'{index % 12}', answer='')")
    (told,) = await try_environment(run_of(f"{module}:Task"))
    assert told.startswith("evaluation.prompts: 12 distinct among 128 prompts, and an evaluation")
    rows = tmp_path / "rows.jsonl"
    text = "".join(f'{{"prompt": "{n % 700}?", "answer": 1}}\n' for n in range(750))
    rows.write_text(text)
    told = await try_environment(run_of("data_set", parameters={"path": str(rows)}))
    assert "rows.jsonl': 50 of 750 rows are repeated" in told[0]
    assert " distinct among 128 prompts, " in told[1]


@pytest.mark.parametrize(
    ("bodies", "words"),
    [
        ({"prompt": "raise KeyError('x')"}, "Task.prompt('train', 0) raised KeyError: 'x' ("),
        ({"prompt": "pass"}, "Task.prompt must return a Prompt, got None ("),
        (
            {"prompt": "assert index == 0; return Prompt(text='a', answer='')"},
            "Task.prompt('train', 1) raised AssertionError",
        ),
        (
            {"prompt": "assert split == 'train'; return Prompt(text='a', answer='')"},
            "Task.prompt('evaluation', 0) raised AssertionError",
        ),
        (
            {"prompt": "return Prompt(text=str(next(calls)), answer='')"},
            "Task.prompt('train', 0) returned '0' and then '3'; it must return the same prompt",
        ),
        ({"prompt": "return Prompt(messages=[{}], answer='')"}, "raised ValueError: messages[0]"),
        (
            {"reward": "return 1 / 0"},
            "Task.reward(prompt, response) raised ZeroDivisionError: division by zero (",
        ),
        ({"reward": "return '1.0'"}, "name: Task.reward must return a number, got str '1.0'"),
        ({"reward": "return float('nan')"}, "Task.reward must return a finite number, got nan"),
        (
            {"reward": "return 1e5"},
            "Task.reward(prompt, response) returned 100000, and a response with more than 10000 ",
        ),
    ],
    ids=lambda each: str(each)[:40],
)
async def test_what_would_fail_at_each_prompt_is_told_with_class_and_method(write, bodies, words):
    told = await refusal_of(f"{write(**bodies)}:Task")
    assert told.startswith("environment.name: ")
    assert words in told
    assert told.endswith("; correct the class")


@pytest.mark.parametrize(
    ("bodies", "words"),
    [
        ({"converse": "raise OSError('no')"}, "Turns.converse(prompt) raised OSError: no ("),
        ({"converse": "return prompt"}, "with the methods next_turn and reward, and this one has"),
        ({"reply": "raise KeyError(response)"}, "raised KeyError: 'The answer is 42.' ("),
        ({"reply": "return 3"}, "Talk.next_turn must return a str, got int 3 ("),
        ({"judge": "return 'good'"}, "Talk.reward must return a number, got str 'good' ("),
    ],
    ids=lambda each: str(each)[:40],
)
async def test_a_conversation_is_tried_by_its_own_calls(write, bodies, words):
    """The class's own `reward` judges no conversation, so it is not called."""
    told = await refusal_of(f"{write(**bodies, reward='raise KeyError(7)')}:Turns")
    assert words in told


async def test_a_class_that_ends_the_process_is_told_with_its_last_word(write):
    module = write(init="exit('no key')")
    told = await refusal_of(f"{module}:Task")
    assert "cannot be made with {} (SystemExit: no key); correct" in told


async def test_a_class_that_is_never_made_is_refused_with_its_line(write):
    module = write(init="threading.Event().wait(5)")
    with pytest.raises(StartError) as refused:
        await try_environment(run_of(f"{module}:Task"), make_s=0.05)
    told = str(refused.value)
    assert told.startswith(f"environment.name: '{module}:Task' was not made within 0.05 s (")
    assert f"{module}.py:8)" in told


async def test_a_call_longer_than_a_workers_limit_is_an_error(write):
    module = write(reward="threading.Event().wait(5)")
    told = await refusal_of(f"{module}:Task", lease_s=2)
    assert "reward(prompt, response) had not returned after 1 s (half of lease" in told


async def test_a_call_that_a_worker_would_wait_for_is_not_called_wrong(write):
    module = write(reward="threading.Event().wait(3)")
    with pytest.raises(NotTriedError) as told:
        await try_environment(run_of(f"{module}:Task"), call_s=0.1)
    assert "Task.reward(prompt, response) had not returned after 0.1 s (" in str(told.value)
    assert str(told.value).endswith("a worker waits for 300 s (half of lease.timeoutSeconds)")


@pytest.fixture
def silent_port():
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    return address[1]


@pytest.mark.parametrize(
    "call",
    [
        "return socket.create_connection(('127.0.0.1', PORT))",
        "return socket.getaddrinfo('reward.invalid', 80)",
    ],
)
@pytest.mark.parametrize("place", ["init", "prompt", "reward"])
async def test_a_service_that_is_down_is_no_error_of_the_environment(
    write, silent_port, place, call
):
    module = write(**{place: call.replace("PORT", str(silent_port))})
    with pytest.raises(NotTriedError) as told:
        await try_environment(run_of(f"{module}:Task"))
    assert str(told.value).startswith("environment.")
    assert "error: " in str(told.value).lower()


FUNCTIONS = """
import torch

def text(prompt, response): return response
def broken(prompt, response): return 1 / 0
def large(prompt, response): return 1e5
def one_number(prompt, response): return torch.tensor(0.5)
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("text", "text must return a number, got str 'The answer is 42.' ("),
        ("broken", "a function raised ZeroDivisionError: division by zero ("),
        ("large", "a function returned 100000, and a response with more than 10000 counts as"),
    ],
)
async def test_a_function_that_gives_no_reward_is_told_before_the_run(
    tmp_path, monkeypatch, function, words
):
    (tmp_path / "judging_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    told = await refusal_of("countdown", rewards=[{"name": f"judging_functions:{function}"}])
    assert told.startswith(f"environment.rewards: {words}")
    assert told.endswith("; correct the function")
    await try_environment(run_of("countdown", rewards=[{"name": "judging_functions:one_number"}]))


async def test_a_parameter_that_the_task_refuses_is_told_as_by_a_worker():
    told = await refusal_of("countdown", parameters={"numbers": [9, 3]})
    assert told.startswith("environment.parameters.numbers: ")
