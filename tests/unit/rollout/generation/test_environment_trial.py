"""An environment is tried before a run, with the calls that a worker makes."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from vcpo.api import VCPORun, parse_run
from vcpo.service.lifecycle import StartError
from vcpo_rollout.trial import NotTriedError, try_environment

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
    await try_environment(run_of(f"{module}:Task"))
    await try_environment(run_of(f"{module}:Turns"))


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
        ({"reward": "return '1.0'"}, "must return a number, got str '1.0'"),
        ({"reward": "return float('nan')"}, "must return a finite number, got nan"),
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
