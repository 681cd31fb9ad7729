"""The core's list of shipped environments is that of the classes."""

import inspect
from importlib import import_module

import pytest

from vcpo.api.environments import BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_listed_parameters_are_those_of_the_class(name):
    module_name, _, class_name = BUILT_IN[name].implementation.partition(":")
    signature = inspect.signature(getattr(import_module(module_name), class_name))
    own = {key: each for key, each in signature.parameters.items() if key != "seed"}
    required = {key for key, each in own.items() if each.default is inspect.Parameter.empty}
    assert BUILT_IN[name].required == required
    assert BUILT_IN[name].optional == set(own) - required
