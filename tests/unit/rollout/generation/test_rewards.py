"""Functions that judge responses, beside an environment or in its place."""

from __future__ import annotations

from typing import Any

import pytest

from vcpo.api.workloads import Environment as EnvironmentSettings
from vcpo_rollout.environments import Prompt, Split
from vcpo_rollout.generation.rewards import make_task

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
    }


def test_a_function_that_is_named_twice_gives_two_parts():
    judged = task(own("exact"), own("exact", weight=3))
    assert judged.reward(PROMPT, "312") == {"exact": 1.0, "exact 2": 3.0}


def test_a_class_is_made_once_with_its_parameters():
    judged = task(own("Counted", parameters={"start": 5}))
    assert [judged.reward(PROMPT, "") for _ in range(2)] == [{"Counted": 6.0}, {"Counted": 7.0}]


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
