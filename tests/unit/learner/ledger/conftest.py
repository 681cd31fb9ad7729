import pytest

from tests.fixtures.learner.dispatcher import ManualClock, make_ledger


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def ledger(clock):
    return make_ledger(clock)
