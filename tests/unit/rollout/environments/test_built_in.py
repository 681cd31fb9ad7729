"""The core's lists of shipped environments and rewards are those of the classes."""

import inspect
from importlib import import_module

import pytest

from vcpo.api.environments import BUILT_IN, BUILT_IN_REWARDS, OWN_REWARD


@pytest.mark.parametrize("listed", [BUILT_IN, BUILT_IN_REWARDS], ids=["environments", "rewards"])
def test_the_listed_parameters_are_those_of_the_class(listed):
    for name in set(listed) - {OWN_REWARD}:
        module_name, _, class_name = listed[name].implementation.partition(":")
        signature = inspect.signature(getattr(import_module(module_name), class_name))
        own = {key: each for key, each in signature.parameters.items() if key != "seed"}
        required = {key for key, each in own.items() if each.default is inspect.Parameter.empty}
        assert (name, listed[name].required) == (name, required)
        assert (name, listed[name].optional) == (name, set(own) - required)
