import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.api.optimizer import Optimizer, Schedule
from vcpo_learner.optimizer.step_rate import base_learning_rate


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
    # From 1 to 0.2 in four parts of 0.2.
    fields = {"schedule": "linear", "finalLearningRateRatio": 0.2}
    assert rates(5, **fields) == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])


def test_a_cosine_schedule_falls_slowly_at_both_ends():
    # (1 + cos(180 degrees * p)) / 2 at p = 0, 1/3, 2/3, 1 is 1, 3/4, 1/4, 0; then 0.2 + 0.8 of it.
    fields = {"schedule": "cosine", "finalLearningRateRatio": 0.2}
    assert rates(4, **fields) == pytest.approx([0.1, 0.08, 0.04, 0.02])


def test_a_schedule_begins_where_the_warmup_ends():
    # Steps 1 and 2 rise; step 2 has the whole rate; steps 3 and 4 fall by half of it each.
    fields = {"schedule": "linear", "warmupSteps": 2, "finalLearningRateRatio": 0.0}
    assert rates(4, **fields) == pytest.approx([0.05, 0.1, 0.05, 0.0])


def test_a_run_of_one_step_has_the_whole_rate():
    assert rates(1, schedule="cosine") == [0.1]


def test_a_skipped_step_delays_the_warmup_and_not_the_schedule():
    # Step 3 of 5 after two skipped steps: the first of 2 warm-up updates, a third of the way down.
    chosen = settings(schedule="linear", warmupSteps=2, finalLearningRateRatio=0.1)
    rate = base_learning_rate(chosen, total_steps=5, steps_taken=2, updates_taken=0)
    assert rate == pytest.approx(0.1 * 0.5 * 0.7)


def test_skipped_steps_do_not_keep_the_last_step_from_the_final_rate():
    chosen = settings(schedule="cosine", finalLearningRateRatio=0.1)
    rate = base_learning_rate(chosen, total_steps=50, steps_taken=49, updates_taken=30)
    assert rate == pytest.approx(0.01)


def test_a_raised_number_of_steps_continues_along_the_longer_course():
    # After 5 of 5 steps the rate was 0; the sixth step of 11 is half-way down.
    chosen = settings(schedule="linear", finalLearningRateRatio=0.0)
    rate = base_learning_rate(chosen, total_steps=11, steps_taken=5, updates_taken=5)
    assert rate == pytest.approx(0.05)


@given(
    schedule=st.sampled_from(Schedule),
    warmup=st.integers(0, 40),
    final=st.floats(0.0, 1.0),
    total_steps=st.integers(1, 60),
    data=st.data(),
)
def test_the_rate_stays_between_zero_and_the_set_rate(schedule, warmup, final, total_steps, data):
    steps_taken = data.draw(st.integers(0, 80))
    updates_taken = data.draw(st.integers(0, steps_taken))
    chosen = settings(schedule=schedule, warmupSteps=warmup, finalLearningRateRatio=final)
    rate = base_learning_rate(
        chosen, total_steps=total_steps, steps_taken=steps_taken, updates_taken=updates_taken
    )
    assert 0.0 <= rate <= 0.1
