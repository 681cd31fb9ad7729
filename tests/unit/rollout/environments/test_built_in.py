"""The core's list of shipped environments is that of the classes."""

import inspect
from importlib import import_module

from vcpo.api.environments import BUILT_IN


def test_the_listed_parameters_are_those_of_the_class():
    for name, listed in BUILT_IN.items():
        module_name, _, class_name = listed.implementation.partition(":")
        signature = inspect.signature(getattr(import_module(module_name), class_name))
        assert (name, listed.parameters | {"seed"}) == (name, set(signature.parameters))
