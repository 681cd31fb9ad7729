import inspect
import sys
from importlib import import_module

import pytest

from tests.unit.rollout.environments.data_files import GSM8K, MATH
from vcpo_rollout.environments import Prompt, Split, make_environment
from vcpo_rollout.environments.countdown import Countdown
from vcpo_rollout.environments.environment import BUILT_IN


class Echo:
    """A user's own environment: the response must be the word, given as many times as asked."""

    def __init__(self, *, seed, word, times=1):
        self.seed, self.word, self.times = seed, word, times

    def prompt(self, split, index):
        return Prompt(text=f"{split}/{index}", answer=self.word * self.times)

    def reward(self, prompt, response):
        return float(prompt.answer == response)


ECHO = f"{__name__}:Echo"


NEEDED = {
    "data_set": {"path": GSM8K, "prompt": "question"},
    "gsm8k": {"path": GSM8K},
    "math": {"path": MATH},
}
"""Parameters without which a task does not work on a machine without network."""


def test_named_task_is_made_with_its_parameters_and_the_seed():
    made = make_environment("countdown", {"numbers": [2, 3], "style": "plain"}, 7)
    assert made == Countdown(seed=7, numbers=(2, 3), style="plain")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_task_works_with_its_defaults(name):
    parameters = NEEDED.get(name, {})
    environment = make_environment(name, parameters, 0)
    prompt = environment.prompt(Split.EVALUATION, 0)
    assert prompt == make_environment(name, parameters, 0).prompt(Split.EVALUATION, 0)
    assert environment.reward(prompt, "no idea") == 0.0


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_two_seeds_make_two_series_of_prompts(name):
    series = [
        [
            make_environment(name, NEEDED.get(name, {}), seed).prompt(Split.TRAIN, index)
            for index in range(20)
        ]
        for seed in (0, 1)
    ]
    assert series[0] != series[1]


def test_users_class_is_found_by_module_and_name():
    environment = make_environment(ECHO, {"word": "ho", "times": 3}, 0)
    assert environment.reward(environment.prompt(Split.TRAIN, 0), "hohoho") == 1.0


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "chess",
            {},
            "'chess' is unknown; use one of countdown, data_set, gsm8k, math, sort_digits",
        ),
        ("no_such_package:Task", {}, "environment.name: .*cannot be imported.*install"),
        ("json:NoSuchTask", {}, "environment.name: .*cannot be imported"),
        (":Task", {}, "environment.name: ':Task' is unknown"),
        (".sibling:Task", {}, "environment.name: '.sibling:Task' is unknown"),
        ("subprocess:Popen", {"args": ["true"]}, "environment.name: .* is not an environment"),
        ("os:getcwd", {}, "environment.name: .* is not an environment"),
        ("countdown", {"digits": 5}, "'digits'.*known parameters are numbers, operators, style"),
        ("countdown", {"seed": 5}, "environment.parameters.seed: 5 .*set the run's seed"),
        (ECHO, {}, "'word'.*the known parameters are times, word"),
    ],
)
def test_what_leads_to_no_environment_is_refused_by_name(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        make_environment(name, parameters, 0)


def test_without_verifiers_its_task_sets_are_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ValueError, match=r"needs the package verifiers.*'vcpo\[verifiers\]'"):
        make_environment("verifiers:words", {}, 0)


def test_the_listed_parameters_are_those_of_the_class():
    for name, listed in BUILT_IN.items():
        module_name, _, class_name = listed.implementation.partition(":")
        signature = inspect.signature(getattr(import_module(module_name), class_name))
        assert (name, listed.parameters | {"seed"}) == (name, set(signature.parameters))
