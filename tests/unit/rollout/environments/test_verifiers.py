from pathlib import Path

import pytest

from vcpo_rollout.environments import Split, make_environment

# It cannot stand beside vLLM's newest dependencies.
pytest.importorskip("verifiers.v1", reason="the extra `verifiers` is not installed")

ALL_TASKS = 40


@pytest.fixture
def words(monkeypatch):
    """The task set of `word_tasks.py`, found as an installed package would be."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return make_environment("verifiers:word-tasks", {}, 0)


def test_the_reward_is_the_weighted_sum_of_the_tasks_own(words):
    prompt = words.prompt(Split.TRAIN, 0)
    word = prompt.text.split()[1]
    # Twice for the right word, once for a short answer.
    assert words.reward(prompt, word[::-1]) == 3.0
    assert words.reward(prompt, "no") == 1.0
    assert words.reward(prompt, "no" * 10) == 0.0


def test_every_task_is_in_one_split(words):
    train, evaluation = (
        {words.prompt(split, index).text for index in range(ALL_TASKS)} for split in Split
    )
    assert len(train) + len(evaluation) == ALL_TASKS
    assert evaluation
    assert not train & evaluation


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("verifiers:nothing-of-the-kind", {}, "the task set 'nothing-of-the-kind' cannot be load"),
        ("verifiers:word-tasks", {"max_tasks": 0}, "environment.parameters.max_tasks: 0 is not an"),
        ("verifiers:word-tasks", {"colour": "red"}, "the known parameters are config, max_tasks, "),
    ],
)
def test_what_cannot_be_used_is_named(name, parameters, said):
    with pytest.raises(ValueError, match=said):
        make_environment(name, parameters, 0)
