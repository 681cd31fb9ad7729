import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.fixtures.learner.updates import make_spec
from vcpo.algo.ess.unit import EssKind, EssReading
from vcpo.api.learner import Optimizer, Schedule
from vcpo_learner.optimizer.policy_optimizer import clip_gradient
from vcpo_learner.optimizer.step_rate import StepRate, base_learning_rate


def layer_with_gradient(value):
    layer = nn.Linear(2, 1)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return layer


def test_a_long_gradient_is_scaled_to_the_largest_norm():
    # Three entries of 2: norm sqrt(12).
    layer = layer_with_gradient(2.0)
    assert clip_gradient(layer.parameters(), 1.0) == pytest.approx(12**0.5)
    entries = torch.cat([layer.weight.grad.flatten(), layer.bias.grad])
    assert float(entries.norm()) == pytest.approx(1.0, rel=1e-5)


def test_a_short_gradient_is_left_as_it_is():
    layer = layer_with_gradient(0.1)
    clip_gradient(layer.parameters(), 1.0)
    assert layer.bias.grad.tolist() == pytest.approx([0.1])


def test_a_gradient_that_is_not_finite_is_reported_and_left_as_it_is():
    layer = layer_with_gradient(1.0)
    layer.weight.grad[0, 0] = float("inf")
    assert clip_gradient(layer.parameters(), 1.0) == float("inf")
    assert layer.bias.grad.tolist() == [1.0]


def settings(**fields):
    return Optimizer.model_validate({"learningRate": 0.1, **fields})


def rates(total_steps, **fields):
    """The base rates of a run that skips no step."""
    return [
        base_learning_rate(
            settings(**fields), total_steps=total_steps, steps_taken=step, updates_taken=step
        )
        for step in range(total_steps)
    ]


def test_a_constant_schedule_keeps_the_set_rate():
    assert rates(3) == [0.1, 0.1, 0.1]


def test_the_warmup_rises_linearly_to_the_set_rate():
    assert rates(6, warmupSteps=4) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_a_linear_schedule_falls_in_equal_parts_to_the_last_step():
    # From 1 to 0.1 in four parts of 0.225.
    assert rates(5, schedule="linear") == pytest.approx([0.1, 0.0775, 0.055, 0.0325, 0.01])


def test_a_cosine_schedule_falls_slowly_at_both_ends():
    # (1 + cos(180 degrees * p)) / 2 at p = 0, 1/3, 2/3, 1 is 1, 3/4, 1/4, 0; then 0.1 + 0.9 of it.
    assert rates(4, schedule="cosine") == pytest.approx([0.1, 0.0775, 0.0325, 0.01])


def test_a_schedule_begins_where_the_warmup_ends():
    # Steps 1 and 2 rise; step 2 has the whole rate; steps 3 and 4 fall by 0.45 of it each.
    fields = {"schedule": "linear", "warmupSteps": 2}
    assert rates(4, **fields) == pytest.approx([0.05, 0.1, 0.055, 0.01])


def test_a_skipped_step_delays_the_warmup_and_not_the_schedule():
    # Step 3 of 5 after two skipped steps: the first of 2 warm-up updates, a third of the way down.
    chosen = settings(schedule="linear", warmupSteps=2)
    rate = base_learning_rate(chosen, total_steps=5, steps_taken=2, updates_taken=0)
    assert rate == pytest.approx(0.1 * 0.5 * 0.7)


def test_a_raised_number_of_steps_continues_along_the_longer_course():
    # After 5 of 5 steps the rate was 0.01; the sixth step of 11 is half-way down.
    chosen = settings(schedule="linear")
    rate = base_learning_rate(chosen, total_steps=11, steps_taken=5, updates_taken=5)
    assert rate == pytest.approx(0.055)


@given(
    schedule=st.sampled_from(Schedule),
    warmup=st.integers(0, 40),
    total_steps=st.integers(1, 60),
    data=st.data(),
)
def test_the_rate_stays_between_zero_and_the_set_rate(schedule, warmup, total_steps, data):
    steps_taken = data.draw(st.integers(0, 80))
    updates_taken = data.draw(st.integers(0, steps_taken))
    chosen = settings(schedule=schedule, warmupSteps=warmup)
    rate = base_learning_rate(
        chosen, total_steps=total_steps, steps_taken=steps_taken, updates_taken=updates_taken
    )
    assert 0.0 <= rate <= 0.1


BASE = 1e-3


def step_rate(**algorithm):
    fields = {"learningRateRule": "trustRegion", "maxPolicyLagSteps": 64, **algorithm}
    return StepRate(make_spec(**fields))


def reading(ess_ratio, on_policy=1.0, chance=0.0, kind=EssKind.SEQUENCE, mismatch=0.0):
    return EssReading(
        kind=kind,
        ess_ratio=ess_ratio,
        on_policy_ess_ratio=on_policy,
        mismatch_nats=mismatch,
        chance_nats=chance,
    )


def taken(rate, readings, size=64):
    """The rates of steps on these readings, each taken as allowed."""
    found = []
    for each in readings:
        rate.observe(each, {1: 64}, size)
        allowed = rate.allowed_rate(BASE)
        rate.take(allowed, allowed)
        found.append(allowed)
    return found


def test_under_another_rule_the_whole_base_rate_is_allowed():
    assert taken(step_rate(learningRateRule="sqrt"), [reading(0.1)] * 2) == [BASE] * 2


def test_nats_count_from_the_on_policy_ratio():
    alike = [taken(step_rate(), [reading(1.0)] + [reading(0.5)] * 5)]
    alike += [taken(step_rate(), [reading(0.4, 0.4)] + [reading(0.2, 0.4)] * 5)]
    assert alike[0] == pytest.approx(alike[1])


def test_a_whole_trajectory_drifts_beside_its_mismatch_and_a_block_is_too_short_to():
    plain, beside, block, blocks = (
        taken(step_rate(), [reading(0.93, kind=kind, mismatch=nats)] * 6, size=4)[-1]
        for kind in (EssKind.SEQUENCE, EssKind.BLOCK)
        for nats in (0.0, 1.0)
    )
    assert beside < plain < block == blocks


def test_a_skipped_step_does_not_count_for_the_warm_up():
    chosen = Optimizer.model_validate({"learningRate": 0.4, "warmupSteps": 4})
    rate = StepRate(make_spec().model_copy(update={"optimizer": chosen}))
    rate.take(None)
    assert rate.base(steps_taken=1) == pytest.approx(0.1)
    rate.take(0.1)
    assert rate.base(steps_taken=2) == pytest.approx(0.2)


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
