"""The benchmark of the learner's host takes a step of each method."""

import pytest

from benchmarks.learner.learner_host import METHODS, host_seconds


@pytest.mark.parametrize("method", METHODS)
def test_reading_a_step_and_the_models_part_are_each_timed(method):
    assert host_seconds(method, (8, 16), repeats=1).keys() == {"read", "step", "model"}
