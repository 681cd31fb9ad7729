import json

import pytest

from tests.fixtures.learner.updates import make_spec
from vcpo.algo.ess.unit import EssKind, EssReading
from vcpo.api.optimizer import Optimizer
from vcpo_learner.optimizer.step_rate import StepRate

BASE = 1e-3


def step_rate(**algorithm):
    fields = {"learningRateRule": "trustRegion", "maxPolicyLagSteps": 64, **algorithm}
    return StepRate(make_spec(**fields))


def reading(ess_ratio, on_policy=1.0, chance=0.0):
    return EssReading(
        kind=EssKind.SEQUENCE,
        ess_ratio=ess_ratio,
        on_policy_ess_ratio=on_policy,
        chance_nats=chance,
    )


def taken(rate, readings, lag=1):
    """The rates of steps on these readings, each taken as allowed."""
    found = []
    for each in readings:
        rate.observe(each, {lag: 64}, 64)
        allowed = rate.allowed_rate(BASE)
        rate.take(allowed, allowed)
        found.append(allowed)
    return found


def test_under_another_rule_the_whole_base_rate_is_allowed():
    assert taken(step_rate(learningRateRule="sqrt"), [reading(0.1)] * 2) == [BASE] * 2


def test_the_horizon_is_the_largest_lag_of_the_run():
    found = taken(step_rate(), [reading(1.0)] * 8)
    assert found == [BASE / 64, BASE / 32, BASE / 16, BASE / 8, BASE / 4, BASE / 2, BASE, BASE]
    assert taken(step_rate(maxPolicyLagSteps=8), [reading(1.0)]) == [BASE / 32]
    assert taken(step_rate(maxPolicyLagSteps=0), [reading(0.1)] * 2) == [BASE] * 2


def test_the_target_is_that_of_the_spec():
    # The batch is four steps at BASE away; it misses what 64 steps at BASE / 4 may miss.
    rate = step_rate(targetEssRatio=0.9)
    for _ in range(4):
        rate.take(BASE, BASE)
    rate.observe(reading(0.9), {4: 1}, 64)
    assert rate.allowed_rate(BASE) == pytest.approx(BASE / 4)


def test_nats_count_from_the_on_policy_ratio():
    alike = [taken(step_rate(), [reading(1.0)] + [reading(0.5)] * 5)]
    alike += [taken(step_rate(), [reading(0.4, 0.4)] + [reading(0.2, 0.4)] * 5)]
    assert alike[0] == pytest.approx(alike[1])


def test_a_dead_band_that_is_given_takes_the_place_of_chance():
    found = taken(step_rate(deadBand=0.5), [reading(0.5, chance=9.0)] * 6)
    assert found[-1] == BASE / 2
    assert taken(step_rate(deadBand=0.0), [reading(0.5, chance=9.0)] * 6)[-1] < BASE / 2


def test_a_skipped_step_does_not_count_for_the_warm_up():
    chosen = Optimizer.model_validate({"learningRate": 0.4, "warmupSteps": 4})
    rate = StepRate(make_spec().model_copy(update={"optimizer": chosen}))
    rate.take(None)
    assert rate.base(steps_taken=1) == pytest.approx(0.1)
    rate.take(0.1)
    assert rate.base(steps_taken=2) == pytest.approx(0.2)


def test_the_start_does_not_go_on_while_steps_are_skipped():
    rate = step_rate()
    taken(rate, [reading(1.0)])
    for _ in range(10):
        rate.observe(reading(1.0), {1: 64}, 64)
        rate.take(None, rate.allowed_rate(BASE))
    assert taken(rate, [reading(1.0)] * 2) == [BASE / 32, BASE / 16]


def test_where_the_schedule_ends_at_no_rate_none_is_allowed():
    chosen = Optimizer.model_validate({"schedule": "linear", "finalLearningRateRatio": 0.0})
    spec = make_spec(learningRateRule="trustRegion")
    rate = StepRate(spec.model_copy(update={"steps": 2, "optimizer": chosen}))
    assert rate.base(steps_taken=1) == 0.0
    rate.observe(reading(0.5), {1: 1}, 64)
    assert rate.allowed_rate(0.0) == 0.0


def test_a_restored_rate_goes_on_as_the_saved_one():
    readings = [reading(each) for each in (1.0, 0.7, 0.4, 0.5)]
    saved, restored = step_rate(), step_rate()
    taken(saved, readings)
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert taken(restored, readings) == taken(saved, readings)


def test_a_state_of_a_rule_without_a_region_starts_one():
    rate = step_rate()
    rate.load_state_dict({"updates_taken": 3, "trust_region": None})
    assert taken(rate, [reading(1.0)]) == [BASE / 64]
