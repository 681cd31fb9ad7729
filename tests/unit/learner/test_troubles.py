"""One table for trouble: rows, answers, and which of equal troubles are told."""

import pytest

from tests.fixtures.learner.dispatcher import ManualClock, make_run
from vcpo_learner.troubles import Answer, Trouble, Troubles


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def told():
    return []


@pytest.fixture
def troubles(clock, told):
    policy = {"maxFailuresInARow": 4, "failureToleranceSeconds": 60}
    spec = make_run(failurePolicy=policy).spec
    return Troubles(spec, clock, lambda *event: told.append(event))


def test_a_row_is_answered_when_it_is_long_enough_and_has_lasted(troubles, clock):
    answers = [troubles.report(Trouble.GENERATION) for _ in range(4)]
    assert answers == [Answer.RETRY] * 4
    assert troubles.answer(Trouble.GENERATION, at_once=True) is Answer.END
    clock.advance(60.0)
    assert troubles.answer(Trouble.GENERATION) is Answer.END
    troubles.end_row(Trouble.GENERATION)
    assert troubles.report(Trouble.GENERATION) is Answer.RETRY


def test_each_worker_has_a_row_of_its_own(troubles):
    answers = [troubles.report(Trouble.WORKER, who=who) for who in ("a", "b", "a")]
    assert answers == [Answer.RETRY, Answer.RETRY, Answer.SET_ASIDE]


def test_a_write_that_fails_is_always_tried_again(troubles):
    assert {troubles.report(Trouble.WRITE) for _ in range(100)} == {Answer.RETRY}


def test_of_equal_troubles_the_first_three_the_tenth_and_the_hundredth_are_told(troubles, told):
    for _ in range(120):
        troubles.report(Trouble.WRITE, "no room")
    assert told == [
        *[("DiskFull", "no room")] * 3,
        ("DiskFull", "no room; 10 times so far"),
        ("DiskFull", "no room; 100 times so far"),
    ]


def test_troubles_without_end_that_all_differ_are_told_a_bounded_number_of_times(troubles, told):
    for number in range(10_000):
        troubles.report(Trouble.GENERATION, f"item {number}", like=number)
    assert len(told) < 300
