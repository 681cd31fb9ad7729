"""What a run does by itself about its warning or its collapse, and when it stops doing it."""

from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import MAX_ROLLBACKS, GuardPolicy, RollbackNeed, Rollbacks
from vcpo.algo.health.rate_backoff import SMALLEST_BACKOFF, RateBackoff

OK, WARN, CRITICAL, DEAD = WarningLevel
LEVELS = st.sampled_from(WarningLevel)
BOUNDS = st.none() | st.sampled_from((WARN, CRITICAL, DEAD))
POLICIES = st.builds(
    GuardPolicy,
    answers_warning=st.booleans(),
    roll_back_from=BOUNDS,
    rolls_back_on_collapse=st.booleans(),
)


def need(policy, level, *, has_collapsed=False, num_rollbacks=0):
    return policy.rollback_need(level, has_collapsed=has_collapsed, num_rollbacks=num_rollbacks)


@given(LEVELS, st.booleans())
def test_a_policy_without_guards_does_nothing(level, has_collapsed):
    policy = GuardPolicy()
    assert not policy.answers(level)
    assert need(policy, level, has_collapsed=has_collapsed) is RollbackNeed.NONE
    assert not policy.lowers_rate


def test_a_critical_warning_is_answered():
    policy = GuardPolicy(answers_warning=True)
    assert [policy.answers(level) for level in WarningLevel] == [False, False, True, True]


def test_a_collapse_rolls_back_whatever_the_warning_says():
    policy = GuardPolicy(rolls_back_on_collapse=True)
    assert {need(policy, level, has_collapsed=True) for level in WarningLevel} == {RollbackNeed.DUE}
    assert {need(policy, level) for level in WarningLevel} == {RollbackNeed.NONE}


def test_a_warning_rolls_back_from_the_level_of_the_policy_on():
    policy = GuardPolicy(roll_back_from=CRITICAL)
    needs = [need(policy, level) for level in WarningLevel]
    assert needs == [RollbackNeed.NONE, RollbackNeed.NONE, RollbackNeed.DUE, RollbackNeed.DUE]


@given(POLICIES, st.lists(st.tuples(LEVELS, st.booleans()), max_size=60))
def test_however_a_run_goes_it_is_rolled_back_at_most_as_often_as_it_may(policy, steps):
    """Every rollback lowers the rate, unless it is at its floor, and no ill step raises it."""
    backoff, rollbacks = RateBackoff(), Rollbacks()
    for version, (level, has_collapsed) in enumerate(steps, 1):
        before = backoff.factor
        backoff = backoff.observe(is_warned=policy.answers(level))
        wanted = need(policy, level, has_collapsed=has_collapsed, num_rollbacks=rollbacks.number)
        if wanted is RollbackNeed.DUE:
            backoff, rollbacks = backoff.after_rollback(), rollbacks.after(version)
            assert backoff.factor == max(SMALLEST_BACKOFF, before / 2)
        assert backoff.factor <= before
    assert rollbacks.number <= MAX_ROLLBACKS
    if not policy.lowers_rate:
        assert backoff.factor == 1.0


@given(POLICIES, LEVELS, st.booleans())
def test_a_worse_run_never_gets_less_help(policy, level, has_collapsed):
    worse = WarningLevel.DEAD
    assert policy.answers(worse) >= policy.answers(level)
    if need(policy, level, has_collapsed=has_collapsed) is not RollbackNeed.NONE:
        assert need(policy, worse, has_collapsed=True) is not RollbackNeed.NONE


@given(POLICIES, LEVELS, st.booleans())
def test_no_checkpoint_is_gone_back_to_that_would_cause_a_rollback_at_once(
    policy, level, has_collapsed
):
    if policy.is_good(level, has_collapsed=has_collapsed):
        assert need(policy, level, has_collapsed=has_collapsed) is RollbackNeed.NONE
        assert not level.is_at_least(CRITICAL)


def test_after_a_rollback_the_lag_may_grow_by_one_version_with_each_step():
    rollbacks = Rollbacks().after(40)
    assert [rollbacks.largest_lag_steps(version) for version in (40, 41, 47)] == [0, 1, 7]
    assert Rollbacks().largest_lag_steps(47) is None
