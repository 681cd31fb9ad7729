"""Learners over the test's own run directory."""

import pytest

from tests.fixtures.learner.training import TrainingFixture


@pytest.fixture
def make_learner(tmp_path):
    return lambda **sections: TrainingFixture(tmp_path, **sections)
