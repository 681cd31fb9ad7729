"""Each example of docs/tasks.md runs as it is written there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from vcpo.api import VCPORun
from vcpo_rollout.environments import Split
from vcpo_rollout.environments.environment import MultiTurnEnvironment
from vcpo_rollout.generation.rewards import make_task
from vcpo_rollout.trial import try_environment

GUIDE = Path("docs/tasks.md").read_text()
FILES = dict(re.findall(r"^`([\w.]+)`:\n```\w+\n(.*?)^```", GUIDE, flags=re.M | re.S))
"""The guide's files by name: a line with the name stands before each."""
FRAGMENTS = re.findall(r"^```yaml\n(.*?)^```", GUIDE, flags=re.M | re.S)


def run_of(text: str) -> VCPORun:
    document = YAML(typ="safe").load(text)
    spec = {"model": {"name": "m"}, "steps": 1, **document.get("spec", document)}
    return VCPORun.model_validate({"metadata": {"name": "guide"}, "spec": spec})


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Write the guide's files into a folder, and begin there."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_block_of_code_is_a_file_or_a_part_of_a_run():
    blocks = re.findall(r"^ *```(?!$)", GUIDE, flags=re.M)
    bare = [text for text in FRAGMENTS if text not in FILES.values()]
    assert len(blocks) == len(FILES) + len(bare)


@pytest.mark.parametrize("text", FRAGMENTS, ids=lambda text: " ".join(text.split())[:50])
async def test_each_part_of_a_run_passes_the_trial(text):
    if "verifiers:" not in text:  # whose package is not installed
        await try_environment(run_of(text))


def judged(name: str, responses: Any) -> list[Any]:
    """Rewards of responses to the first prompt; of a conversation: a list of turns each."""
    run = run_of(FILES[name])
    task = make_task(run.spec.environment, 0)
    prompt = task.prompt(Split.TRAIN, 0)
    if not isinstance(task, MultiTurnEnvironment):
        return [task.reward(prompt, each) for each in responses(prompt)]
    rewards = []
    for turns in responses(prompt):
        conversation = task.converse(prompt)
        replies = [conversation.next_turn(each) for each in turns]
        rewards.append((replies, conversation.reward()))
    return rewards


def test_the_functions_of_the_guide_judge_as_it_says():
    rewards = judged("questions.yaml", lambda prompt: [prompt.answer, "It is right."])
    weight = rewards[0]["exact"]
    assert weight in {1.0, 2.0}
    assert rewards == [
        {"exact": weight, "form.digits": 0.1, "form.short": 0.1, "score": weight + 0.2},
        {"exact": 0.0, "form.digits": 0.0, "form.short": 0.0, "score": 0.0},
    ]


def test_the_class_of_the_guide_judges_as_it_says():
    texts = judged("backwards.yaml", lambda each: [each.answer, each.metadata["word"], ""])
    assert texts == [1.0, -0.5, 0.0]


def test_the_conversation_of_the_guide_ends_with_the_number():
    rewards = judged("guessing.yaml", lambda each: [["-1", "99", each.answer], ["99"] * 7])
    assert rewards == [
        (["Write a number alone.", "Lower.", None], 1.0),
        (["Lower."] * 6 + [None], 0.0),
    ]
