"""Learners over the test's own run directory."""

import pytest

from tests.fixtures.learner.training_scene import Learner


@pytest.fixture
def make_learner(tmp_path):
    return lambda **sections: Learner(tmp_path, **sections)
