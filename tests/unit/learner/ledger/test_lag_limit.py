"""The host sets the lag limit; a warning and a rollback lower it, and only the host raises it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.records import step_record
from vcpo.algo import Rollbacks, WarningLevel
from vcpo_learner.ledger.changes import LagLimitLeft
from vcpo_learner.ledger.lag_limit import LagLimit, left_from_message, left_to_message

BOUND = 6
CRITICAL, WARN, OK = WarningLevel.CRITICAL, WarningLevel.WARN, WarningLevel.OK
OFF = {"enabled": False}


def lag_limit(**health):
    return LagLimit(make_run(algorithm={"maxPolicyLagSteps": BOUND}, health=health).spec)


def resume(limit, left, level, *, rollbacks=Rollbacks(), version=2):  # noqa: B008
    limit.resume(left, level, rollbacks, version=version)


def observe(limit, level, step=1):
    return limit.observe(step_record(warning_level=level, warning_score=0.714), step=step)


def test_a_critical_warning_lowers_the_limit_to_zero_and_says_so_once():
    limit = lag_limit()
    told = [
        observe(limit, level, step) for step, level in enumerate((OK, WARN, CRITICAL, CRITICAL))
    ]
    assert told == [
        None,
        None,
        "Lag limit 6 -> 0 versions: early warning critical (score 0.71) at step 2.",
        None,
    ]
    assert limit.steps == 0


def test_the_limit_stays_after_the_warning_until_the_host_sets_another():
    limit = lag_limit()
    observe(limit, CRITICAL)
    observe(limit, OK)
    assert limit.steps == 0
    assert limit.set(3) == limit.steps == 3


def test_a_host_that_has_not_heard_of_the_warning_does_not_raise_the_limit():
    limit = lag_limit()
    observe(limit, CRITICAL)
    assert limit.set(5) == limit.steps == 0


@pytest.mark.parametrize(
    ("health", "limits"),
    [
        ({}, [6, 6, 0]),
        ({"throttleFrom": "warn"}, [6, 0, 0]),
        ({"throttleFrom": "dead"}, [6, 6, 6]),
        ({"throttleFrom": "never"}, [6, 6, 6]),
        (OFF, [6, 6, 6]),
    ],
)
def test_the_spec_says_from_which_level_on_the_learner_reacts(health, limits):
    limit, seen = lag_limit(**health), []
    for level in (OK, WARN, CRITICAL):
        observe(limit, level)
        seen.append(limit.steps)
    assert seen == limits


def test_a_resumed_run_goes_on_under_the_limit_that_was_left():
    before, limit = lag_limit(), lag_limit()
    before.set(2)
    resume(limit, before.left, OK)
    assert limit.steps == 2


def test_a_learner_that_dies_right_after_a_critical_step_resumes_under_the_limit_it_left():
    # The checkpoint is of an earlier, healthy step.
    before, limit = lag_limit(), lag_limit()
    before.set(4)
    observe(before, CRITICAL, step=7)
    limit.begin_redo(before.left, Rollbacks(), version=7)
    assert (limit.steps, limit.set(3)) == (0, 0)


def test_a_limit_that_was_left_above_the_bound_of_a_changed_spec_is_the_bound():
    limit = lag_limit()
    resume(limit, LagLimitLeft(steps=BOUND + 3, level=OK, rollbacks=Rollbacks()), OK)
    assert limit.steps == BOUND


def test_a_run_that_resumes_from_a_critical_step_stays_throttled():
    limit = lag_limit()
    resume(limit, None, CRITICAL)
    assert (limit.steps, limit.set(4)) == (0, 0)


def test_a_run_whose_limit_was_never_changed_resumes_at_its_bound():
    limit = lag_limit()
    resume(limit, None, OK)
    assert limit.steps == BOUND


def test_after_a_rollback_no_limit_reaches_back_before_it():
    limit, seen = lag_limit(), []
    observe(limit, OK, step=40)
    limit.roll_back(Rollbacks().after(40), OK)
    for step in range(40, 49):
        observe(limit, OK, step)
        seen.append(limit.set(BOUND))
    assert seen == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_a_rollback_ends_the_warning_that_it_answers():
    limit = lag_limit()
    observe(limit, CRITICAL, step=40)
    limit.roll_back(Rollbacks().after(40), OK)
    assert limit.set(5) == 0
    observe(limit, OK, step=45)
    assert limit.set(5) == 5


def test_a_run_that_resumes_after_a_rollback_keeps_its_distance_from_it():
    limit = lag_limit()
    resume(limit, None, OK, rollbacks=Rollbacks().after(40), version=43)
    assert limit.steps == 3


def test_a_redo_keeps_the_limit_of_the_ledgers_version_until_its_end():
    # The checkpoint is of step 20, which rolled the run back; the ledger is that of version 26.
    before, limit, rollbacks = lag_limit(), lag_limit(), Rollbacks().after(20)
    before.roll_back(rollbacks, OK)
    limit.begin_redo(before.left, rollbacks, version=26)
    assert limit.steps == 6
    assert limit.set(3) == 3
    limit.end_redo(OK, rollbacks, version=26)
    assert limit.steps == 3


def test_a_redo_knows_of_a_rollback_that_no_checkpoint_holds():
    before, limit = lag_limit(), lag_limit()
    before.roll_back(Rollbacks().after(4), OK)
    limit.begin_redo(before.left, Rollbacks(), version=6)
    assert limit.set(BOUND) == 2


def test_a_redo_from_a_critical_checkpoint_goes_on_under_the_limit_that_was_raised_since():
    before, limit = lag_limit(), lag_limit()
    observe(before, CRITICAL)
    observe(before, OK)
    before.set(4)
    limit.begin_redo(before.left, Rollbacks(), version=2)
    assert limit.steps == 4
    limit.end_redo(CRITICAL, Rollbacks(), version=2)
    assert limit.steps == 0


@given(
    st.builds(
        LagLimitLeft,
        steps=st.integers(0, 100),
        level=st.sampled_from(WarningLevel),
        rollbacks=st.builds(
            Rollbacks, number=st.integers(0, 5), version=st.none() | st.integers(0, 100)
        ),
    )
)
def test_what_was_left_comes_back_from_its_message(left):
    assert left_from_message(left_to_message(left)) == left


@settings(deadline=None)
@given(st.lists(st.sampled_from(WarningLevel) | st.integers(0, 20), max_size=40))
def test_the_limit_is_never_above_what_the_host_set_last_nor_above_the_bound(happenings):
    limit, host = lag_limit(), BOUND
    for each in happenings:
        before = limit.steps
        if isinstance(each, WarningLevel):
            observe(limit, each)
            assert limit.steps <= before, "a warning raised the limit"
        else:
            host = each
            limit.set(each)
        assert 0 <= limit.steps <= min(host, BOUND)
