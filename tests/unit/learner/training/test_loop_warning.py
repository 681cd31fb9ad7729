"""What the training loop does after a step whose early warning is critical."""

from dataclasses import replace

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.journal import read_events, read_metrics


async def test_a_critical_step_throttles_the_run_before_its_version_is_published(
    make_learner, tmp_path
):
    learner = make_learner()
    learner.update.warnings = {0: WarningLevel.CRITICAL}
    published, limits = learner.published_state, []
    take = published.take

    def watched(precision):
        limits.append(learner.dispatcher.lag_limit_steps)
        return take(precision)

    published.take = watched
    await learner.run()
    assert limits == [1, 0, 0, 0]
    assert [step.lag_limit_steps for step in read_metrics(tmp_path).steps] == [1, 0, 0]
    told = [event.message for event in read_events(tmp_path) if event.kind == "Throttled"]
    assert told == ["Lag limit 1 -> 0 versions: early warning critical (score 0.71) at step 1."]


async def test_a_spec_that_ignores_critical_warnings_keeps_the_lag(make_learner, tmp_path):
    learner = make_learner(health={"enabled": False})
    learner.update.warnings = dict.fromkeys(range(3), WarningLevel.DEAD)
    await learner.run()
    assert {step.lag_limit_steps for step in read_metrics(tmp_path).steps} == {1}


async def test_a_far_reward_is_an_event_with_its_worker_and_its_prompt(make_learner, tmp_path):
    learner = make_learner()
    finish = learner.update.finish

    def finished(newest=()):
        return replace(finish(newest), reward_limits=(-0.5, 0.5))  # all rewards are 1

    learner.update.finish = finished
    await learner.run(until_step=1)
    (told,) = [event.message for event in read_events(tmp_path) if event.kind == "RewardsFar"]
    assert told.startswith("step 1: 1 from worker w for prompt 0, ")


async def test_a_learner_that_resumes_does_not_report_the_warning_of_its_checkpoint_again(
    make_learner, tmp_path
):
    learner = make_learner()
    for _ in range(9):
        learner.update.health.observe_refusal([1.0])
    level = learner.update.health.level
    assert level.is_at_least(WarningLevel.CRITICAL)
    learner.update.warnings = {0: level}
    await learner.run(until_step=1)
    later = make_learner()
    later.update.warnings = {1: level}
    later.training.resume()
    await later.run()
    told = [event.message for event in read_events(tmp_path) if event.kind == "CollapseWarning"]
    assert told == ["step 1: critical (score 0.71)", "step 3: ok (score 0.00)"]
