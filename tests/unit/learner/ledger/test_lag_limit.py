"""The host sets the lag limit; a warning and a rollback lower it, and only the host raises it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import dispatcher_fixture
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import Rollbacks
from vcpo_learner.ledger.lag_limit import LagLimit, limit_from_message, limit_to_message

BOUND = 6
CRITICAL, WARN, OK = WarningLevel.CRITICAL, WarningLevel.WARN, WarningLevel.OK
OFF = {"enabled": False}
NONE = Rollbacks()


def make_dispatcher(**health):
    return dispatcher_fixture(algorithm={"maxPolicyLagSteps": BOUND}, health=health).dispatcher


def observe(dispatcher, level):
    dispatcher.observe_health(level, dispatcher.lag_limit.rollbacks)


def test_the_limit_stays_after_the_warning_until_the_host_sets_another():
    dispatcher = make_dispatcher()
    observe(dispatcher, CRITICAL)
    observe(dispatcher, OK)
    assert dispatcher.lag_limit_steps == 0
    assert dispatcher.throttle(3) == dispatcher.lag_limit_steps == 3


def test_a_host_that_has_not_heard_of_the_warning_does_not_raise_the_limit():
    dispatcher = make_dispatcher()
    observe(dispatcher, CRITICAL)
    assert dispatcher.throttle(5) == dispatcher.lag_limit_steps == 0


@pytest.mark.parametrize(
    ("health", "limits"),
    [
        ({}, [6, 6, 0]),
        (OFF, [6, 6, 6]),
    ],
)
def test_a_learner_reacts_to_a_critical_warning_unless_the_spec_forbids_it(health, limits):
    dispatcher, seen = make_dispatcher(**health), []
    for level in (OK, WARN, CRITICAL):
        observe(dispatcher, level)
        seen.append(dispatcher.lag_limit_steps)
    assert seen == limits


def test_a_limit_that_was_left_above_the_bound_of_a_changed_spec_is_the_bound():
    dispatcher = make_dispatcher()
    dispatcher.ledger.record_lag_limit(LagLimit(steps=BOUND + 3))
    assert dispatcher.lag_limit_steps == BOUND


def test_after_a_rollback_no_limit_reaches_back_before_it():
    limit = LagLimit(steps=BOUND, rollbacks=NONE.after(40))
    seen = [limit.in_force(version) for version in range(40, 49)]
    assert seen == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_a_rollback_ends_the_warning_that_it_answers():
    dispatcher = make_dispatcher()
    observe(dispatcher, CRITICAL)
    dispatcher.observe_health(OK, NONE.after(40))
    assert dispatcher.throttle(5) == 0
    assert dispatcher.lag_limit.in_force(45) == 5


def test_a_rollback_leaves_what_the_host_had_set():
    limit = LagLimit(steps=3).after_step(OK, NONE.after(20), make_dispatcher()._spec.health.guards)
    assert [limit.in_force(version) for version in (21, 26)] == [1, 3]


@given(
    st.builds(
        LagLimit,
        steps=st.integers(0, 100),
        level=st.sampled_from(WarningLevel),
        rollbacks=st.builds(
            Rollbacks, number=st.integers(0, 5), version=st.none() | st.integers(0, 100)
        ),
    )
)
def test_a_limit_comes_back_from_its_message(limit):
    assert limit_from_message(limit_to_message(limit)) == limit


@settings(deadline=None)
@given(st.lists(st.sampled_from(WarningLevel) | st.integers(0, 20), max_size=40))
def test_the_limit_is_never_above_what_the_host_set_last_nor_above_the_bound(happenings):
    dispatcher, host = make_dispatcher(), BOUND
    for each in happenings:
        before = dispatcher.lag_limit_steps
        if isinstance(each, WarningLevel):
            observe(dispatcher, each)
            assert dispatcher.lag_limit_steps <= before, "a warning raised the limit"
        else:
            host = each
            dispatcher.throttle(each)
        assert 0 <= dispatcher.lag_limit_steps <= min(host, BOUND)
