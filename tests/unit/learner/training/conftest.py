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
        name = f"now{len(learners) or ''}"  # each process has another
        learners.append(TrainingFixture(tmp_path, incarnation=name, **sections))
        return learners[-1]

    yield make
    for last in learners:
        last.log.close()
