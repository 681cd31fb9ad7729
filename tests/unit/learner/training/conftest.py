"""Learners over the test's own run directory."""

import pytest

from tests.fixtures.learner.training import TrainingFixture


@pytest.fixture
def make_learner(tmp_path):
    """Make the learner of a new process; the one before has ended, as a process does."""
    learners = []

    def make(**sections):
        for earlier in learners:
            earlier.log.close()
        learners[:] = [TrainingFixture(tmp_path, **sections)]
        return learners[0]

    yield make
    for last in learners:
        last.log.close()
