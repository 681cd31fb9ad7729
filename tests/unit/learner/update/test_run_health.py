"""What a run's guards do about its warning and its rewards, also after a restart."""

import json

import pytest

from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import make_spec
from vcpo.algo.health.early_warning import StepHealth, WarningLevel
from vcpo.algo.health.guards import RollbackNeed, Rollbacks
from vcpo.algo.health.rate_backoff import RateBackoff
from vcpo.api.health import Health
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.run_health import RunHealth

STEPS_TO_CRITICAL = 5
"""The first step with a level."""


KEEPS_RATE = ({"enabled": False},)


def spec(**health):
    return make_spec().model_copy(update={"health": Health.model_validate(health)})


def critical_health(**settings):
    health = RunHealth(spec(**settings))
    for _ in range(STEPS_TO_CRITICAL):
        health.observe_refusal([1.0])
    return health


def collapsed_health(**settings):
    """Ten steps at a reward of 1, and ten at 0."""
    health = RunHealth(spec(**settings))
    for reward in [1.0] * 10 + [0.0] * 10:
        health._observe(StepHealth(relative_ess=1.0), [reward] * 8)
    return health


def test_a_run_that_gets_critical_goes_on_at_half_its_rate():
    health = RunHealth(spec())
    factors = []
    for _ in range(STEPS_TO_CRITICAL):
        health.observe_refusal([1.0])
        factors.append(health.backoff.factor)
    assert health.level is WarningLevel.CRITICAL
    assert factors == [1.0, 1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("settings", KEEPS_RATE)
def test_the_spec_may_keep_the_rate(settings):
    health = critical_health(**settings)
    assert (health.level, health.backoff.factor) == (WarningLevel.CRITICAL, 1.0)


def test_an_update_steps_at_the_lowered_rate_and_reports_it():
    update = PolicyUpdate(seeded_model(llama), spec(), PAD)
    groups = sampled_groups(seeded_model(llama))
    plain = update.step(groups, policy_version=0)
    update.health.backoff = RateBackoff(factor=0.25, age_steps=3)
    lowered = update.step(groups, policy_version=1)
    assert (plain.learning_rate_backoff, lowered.learning_rate_backoff) == (1.0, 0.25)
    assert plain.learning_rate == pytest.approx(1e-3 * plain.learning_rate_scale)
    assert lowered.learning_rate == pytest.approx(0.25e-3 * lowered.learning_rate_scale)


def test_a_restored_run_is_as_critical_and_as_slow_as_before():
    health, restored = critical_health(), RunHealth(spec())
    restored.load_state_dict(json.loads(json.dumps(health.state_dict())))
    assert (restored.level, restored.score) == (health.level, health.score)
    assert restored.backoff == health.backoff == RateBackoff(factor=0.5, age_steps=0)


@pytest.mark.parametrize("settings", KEEPS_RATE)
def test_a_run_that_resumes_with_a_spec_that_keeps_the_rate_has_its_whole_rate_again(settings):
    health = RunHealth(spec(**settings))
    health.load_state_dict(critical_health().state_dict())
    assert (health.level, health.backoff.factor) == (WarningLevel.CRITICAL, 1.0)


def test_a_run_whose_rewards_collapsed_needs_a_rollback():
    health = collapsed_health()
    assert (health.level, health.rollback_need) == (WarningLevel.OK, RollbackNeed.DUE)
    assert not health.is_good
    assert collapsed_health(enabled=False).rollback_need is RollbackNeed.NONE


def test_a_run_that_goes_back_has_the_warning_of_then_and_a_lower_rate_than_now():
    good, bad = RunHealth(spec()), critical_health()
    good._observe(StepHealth(relative_ess=0.9), [1.0])
    saved = json.loads(json.dumps(good.state_dict()))
    bad.backoff = RateBackoff(factor=0.25, age_steps=3)
    bad.load_state_dict(bad.rolled_back_state(saved, version=40))
    assert (bad.level, bad.rewards) == (WarningLevel.OK, good.rewards)
    assert bad.backoff == RateBackoff(factor=0.125, ceiling=0.125, age_steps=0)
    assert bad.rollbacks == Rollbacks(number=1, version=40)
    assert bad.is_good
