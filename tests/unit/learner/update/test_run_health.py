"""A critical run goes on at half its learning rate, also after a restart."""

import json

import pytest

from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import make_spec
from vcpo.algo import EarlyWarning, RateBackoff, StepHealth, WarningLevel
from vcpo.spec.workloads import CriticalResponse
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.update.run_health import RunHealth

STEPS_TO_CRITICAL = 4
"""Of the first ten steps of a run, four bad ones are critical."""


def spec(response=CriticalResponse.THROTTLE_AND_SLOW):
    run = make_spec()
    control = run.control.model_copy(update={"on_critical": response})
    return run.model_copy(update={"control": control})


def critical_health(response=CriticalResponse.THROTTLE_AND_SLOW):
    health = RunHealth(spec(response))
    for _ in range(STEPS_TO_CRITICAL):
        health.observe_refusal()
    return health


def test_a_run_that_gets_critical_goes_on_at_half_its_rate():
    health = RunHealth(spec())
    factors = []
    for _ in range(STEPS_TO_CRITICAL):
        health.observe_refusal()
        factors.append(health.backoff.factor)
    assert health.level is WarningLevel.CRITICAL
    assert factors == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("response", [CriticalResponse.THROTTLE, CriticalResponse.IGNORE])
def test_the_spec_may_keep_the_rate(response):
    health = critical_health(response)
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


def test_a_checkpoint_from_before_there_was_a_backoff_is_read():
    warning = EarlyWarning().observe(StepHealth(relative_ess=0.5))
    health = RunHealth(spec())
    health.load_state_dict(warning.to_dict())
    assert health.backoff == RateBackoff()


def test_a_run_that_resumes_with_a_spec_that_keeps_the_rate_has_its_whole_rate_again():
    health = RunHealth(spec(CriticalResponse.THROTTLE))
    health.load_state_dict(critical_health().state_dict())
    assert (health.level, health.backoff.factor) == (WarningLevel.CRITICAL, 1.0)
