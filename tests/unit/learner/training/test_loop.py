"""The training loop with a worker that responds at once and an update that only counts."""

import asyncio
from dataclasses import replace

import pytest

from tests.fixtures.fresh_tokens import blocks, of_workers
from tests.fixtures.learner.dispatcher import make_trajectory, work_request
from tests.fixtures.learner.training import MemoryLog, TrainingFixture
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.mismatch_review import MismatchError
from vcpo.judgement import lasting_collapse
from vcpo.records.journal import read_events, read_metrics
from vcpo.records.reasons import SetAsideCause
from vcpo.records.samples import read_answers, read_samples, sampled_steps
from vcpo.wire.failures import Failure, FailureCause
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import FinishReason
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.ledger.workers import TooManyFailuresError
from vcpo_learner.training.batches import batch_fields, lag_fields
from vcpo_learner.troubles import TOLERANCE_S


def make_group(number, **changes):
    lease_id = f"train-now-{number}"
    members = tuple(replace(make_trajectory(lease_id, at), **changes) for at in range(2))
    return Lease(
        grant_number=number,
        group_number=number,
        lease_id=lease_id,
        worker_id="w",
        prompt_index=10 + number,
        accepted=dict(enumerate(members)),
    )


async def test_a_run_takes_its_steps_and_is_complete(make_learner, tmp_path):
    learner = make_learner()
    assert await learner.run() is RunPhase.COMPLETE
    assert learner.update.steps == [0, 1, 2]
    metrics = read_metrics(tmp_path)
    assert [step.consumed for step in metrics.steps] == [4, 8, 12]
    assert [one.step for one in metrics.evaluations] == [0, 3]
    assert [{one.step for one in answers} for answers in read_answers(tmp_path)] == [{0}, {3}]
    assert (tmp_path / "model" / "model.safetensors").exists()


async def test_a_step_keeps_some_of_its_responses_for_people(make_learner, tmp_path):
    learner = make_learner()
    await learner.run()
    samples = list(read_samples(tmp_path, sampled_steps(tmp_path)))
    assert [each.step for each in samples] == [1] * 4 + [2] * 4 + [3] * 4
    assert {(each.prompt, each.response) for each in samples} == {("3 4", "5")}


async def test_a_refused_update_is_a_version_too(make_learner, tmp_path):
    learner = make_learner()
    learner.update.refused = {1}
    await learner.run()
    assert [step.skipped for step in read_metrics(tmp_path).steps] == [None, "no_gradient", None]
    assert [event.message for event in read_events(tmp_path) if event.kind == "StepSkipped"] == [
        "step 2: all rewards of every prompt are equal: it is solved, or there is nothing to learn"
    ]


def messages(run_dir, kind):
    return [event.message for event in read_events(run_dir) if event.kind == kind]


async def test_a_run_whose_behavior_policy_is_another_model_ends_before_its_first_version(
    make_learner, tmp_path
):
    learner = make_learner()
    learner.update.fresh = of_workers(w=0.7)
    with pytest.raises(MismatchError, match=r"0.7 nats.*at most 0.002"):
        await learner.run()
    assert learner.dispatcher.policy_version == 0
    assert read_events(tmp_path)[-1].kind == "SelfCheckFailed"


async def test_behavior_and_target_policy_are_compared_once_there_is_enough_to_compare(
    make_learner, tmp_path
):
    learner = make_learner()
    learner.update.fresh = blocks(0.0005, 7)
    finish = learner.update.finish

    def finish_step(newest=()):
        result = finish(newest)
        # The first two steps together have enough to compare; one block makes no fault.
        gap = 0.0015 if learner.update.pending.policy_version == 0 else 0.7
        learner.update.fresh = blocks(gap, 1)
        return result

    learner.update.finish = finish_step
    assert await learner.run() is RunPhase.COMPLETE
    assert messages(tmp_path, "SelfCheck") == [
        "workers and learner differ by 0.0005 nats per token; at most 0.002 is expected"
    ]
    assert [step.mismatch.get("gap_nats") for step in read_metrics(tmp_path).steps] == [
        None,
        pytest.approx(0.0005),
        pytest.approx((7 * 0.0005 + 0.0015) / 8),
    ]


async def test_engines_that_agree_again_end_no_run(make_learner, tmp_path):
    learner = make_learner(steps=5)
    gaps = {0: 0.7, 1: 0.7, 2: 0.001, 3: 0.001}
    learner.update.fresh = blocks(0.001, 64)
    finish = learner.update.finish
    told = []

    def finish_step(newest=()):
        result = finish(newest)
        told.append(learner.signals.message().mismatch)
        learner.update.fresh = blocks(gaps.get(learner.update.pending.policy_version, 0.001), 64)
        return result

    learner.update.finish = finish_step
    assert await learner.run() is RunPhase.COMPLETE
    kinds = [event.kind for event in read_events(tmp_path)]
    assert [kind for kind in kinds if "gree" in kind] == ["EnginesDisagree", "EnginesAgree"]
    # What signals say before each step's own review.
    assert [bool(text) for text in told] == [False, False, True, True, False]


async def test_a_record_has_the_gaps_by_worker_engine_and_position(make_learner, tmp_path):
    learner = make_learner(
        rollouts=[
            {"name": "main", "maxReplicas": 2},
            {"name": "fast", "engine": "vllm", "maxReplicas": 2},
        ]
    )
    learner.update.limit_nats = 1.0
    for worker, group in (("a", "main"), ("b", "main"), ("c", "fast")):
        request = replace(work_request(worker_id=worker, room=1), rollout_group=group)
        await learner.dispatcher.lease(request, wait_s=0)
    late = blocks(0.05, 9, position=70, worker="c")
    learner.update.fresh = of_workers(a=0.01, b=0.02, c=[*blocks(0.03, 7, worker="c"), *late])
    await learner.run()
    found = read_metrics(tmp_path).steps[0].mismatch
    of_c = (7 * 0.03 + 8 * 0.05) / 15  # the largest is left out
    assert found["by_worker"] == pytest.approx({"c": of_c, "b": 0.02, "a": 0.01})
    assert found["by_engine"] == pytest.approx({"hf": 0.01, "vllm": of_c})
    # 15 blocks of a and b at 0.01 and 0.02, less the largest of each, and 7 at 0.03 of c.
    at_start = (7 * 0.01 + 7 * 0.02 + 7 * 0.03) / 21
    assert found["by_position"] == pytest.approx({"0": at_start, "64": 0.05})
    assert found["gap_nats"] == pytest.approx(0.02)
    assert found["worst_gap_nats"] == pytest.approx(of_c)


async def test_one_worker_of_another_model_does_not_end_the_run_and_is_set_aside(
    make_learner, tmp_path
):
    learner = make_learner()
    learner.update.fresh = of_workers(good=0.001, bad=0.7)
    assert await learner.run() is RunPhase.COMPLETE
    assert learner.dispatcher.registry.num_set_aside == {SetAsideCause.MISMATCH: 1}
    assert "0.7 nats per token" in learner.dispatcher.registry.latest_set_aside[0].message


async def test_behavior_and_target_policy_are_compared_again_after_a_resume(make_learner, tmp_path):
    for until_step in (1, None):
        learner = make_learner()
        learner.training.recovery.resume()
        learner.update.fresh = of_workers(w=0.001)
        await learner.run(until_step=until_step)
    kinds = [event.kind for event in read_events(tmp_path)]
    assert kinds.count("SelfCheck") == 2


async def test_what_goes_wrong_in_a_round_beside_training_ends_the_run(make_learner):
    learner = make_learner(evaluation={"prompts": 1, "everySteps": 1}, steps=50)

    def broken(record, accuracies):
        if record.step > 0:
            raise OSError("no space left")

    learner.gauges.record_evaluation = broken
    with pytest.raises(OSError, match="no space left"):
        await learner.run()
    assert learner.dispatcher.policy_version < 50


def group(*versions):
    one = make_trajectory("train-now-0", 0, versions=versions)
    return replace(make_group(0), accepted={0: one})


def test_lag_counts_every_token_once():
    # Ages at version 5: 5, 1, 1 and 0, 0, 0; in order 0 0 0 1 1 5.
    lag = lag_fields([group(0, 4, 4), group(5, 5, 5)], policy_version=5)
    assert lag == {"lag_mean": 7 / 6, "lag_p50": 0, "lag_max": 5}


def test_the_median_lag_is_the_lower_of_two_in_the_middle():
    assert lag_fields([group(0, 0, 3, 3)], policy_version=3)["lag_p50"] == 0
    assert lag_fields([group(0, 0, 0, 3, 3)], policy_version=3)["lag_p50"] == 3


def test_a_batch_says_what_is_cut_what_is_equal_and_how_long_its_prompts_are():
    cut, longer = FinishReason.LENGTH, tuple(range(7))
    groups = [make_group(0), make_group(1, reward=0.5), make_group(2, prompt_token_ids=longer)]
    groups[0].accepted[1] = replace(
        groups[0].accepted[1], reward=0.0, finish_reason=cut, reward_parts={"a": 3.0, "b": -3.0}
    )
    fields = batch_fields(groups, policy_version=2)
    assert fields["cut_responses_ratio"] == pytest.approx(1 / 6)
    assert fields["equal_groups_ratio"] == pytest.approx(2 / 3)
    assert fields["prompt_tokens_mean"] == pytest.approx((2 + 2 + 7) / 3)
    assert (fields["prompt_tokens_max"], fields["lag_max"]) == (7, 2)
    assert fields["reward_parts"] == {"a": 0.5, "b": -0.5}  # of six responses one has parts


def test_a_batch_says_how_long_its_short_middle_and_long_responses_are():
    # Of 1, 2, ..., 21 tokens one gap in twenty is 5 %; inserted tokens were not sampled.
    sizes = [*range(21, 0, -2), *range(2, 21, 2)]
    responses = {
        at: make_trajectory("train-now-0", at, versions=(0,) * size)
        for at, size in enumerate(sizes)
    }
    fields = batch_fields([replace(make_group(0), accepted=responses)], policy_version=0)
    shown = [fields[f"response_tokens_{name}"] for name in ("p05", "p50", "p95")]
    assert shown == [2, 11, 20]


def answer_worse_after_the_first_evaluation(learner):
    submit = learner.submit

    def submit_worse(given, **changes):
        submit(given, reward=0.0 if learner.dispatcher.policy_version else 1.0, **changes)

    learner.submit = submit_worse


async def test_a_run_that_collapsed_ends_with_that_word_in_events_and_signals(
    make_learner, tmp_path
):
    learner = make_learner()
    answer_worse_after_the_first_evaluation(learner)
    assert await learner.run() is RunPhase.COMPLETE
    told = learner.signals.message().collapse
    assert told == lasting_collapse(read_metrics(tmp_path))
    assert told.startswith("The run collapsed: the held-out reward fell from 1 ")
    last = read_events(tmp_path)[-1]
    assert (last.kind, last.message) == ("Collapsed", f"3 steps; the model is saved. {told}")


async def test_a_run_that_was_stopped_is_not_judged(make_learner):
    learner = make_learner()
    answer_worse_after_the_first_evaluation(learner)
    assert await learner.run(until_step=1) is RunPhase.DRAINING
    assert learner.signals.message().collapse == ""


async def test_a_log_that_grows_fast_makes_checkpoints_due(tmp_path):
    # A step has some 400 bytes in the log: this is ten of sixty steps.
    log = RedoLog(tmp_path, lambda *_: None)
    log.checkpoint_bytes = 4_000
    learner = TrainingFixture(tmp_path, log=log, steps=60, checkpoint={"everySteps": 1000})
    await learner.run()
    kinds = [event.kind for event in read_events(tmp_path)]
    assert kinds.count("CheckpointSaved") >= 3


class LogOnAFullDisk(MemoryLog):
    """Nothing is written any more, as soon as a test says so."""

    async def wait_until_kept(self):
        if self.is_unwritable:
            await asyncio.Event().wait()


async def test_a_disk_that_is_full_at_the_end_ends_the_evaluations(tmp_path):
    log = LogOnAFullDisk()
    learner = TrainingFixture(tmp_path, log=log, steps=2, evaluation={"everySteps": 1})
    evaluate, record_step = learner.dispatcher.evaluate, learner.signals.record_step

    async def evaluate_late(step, *, exclusive):
        if not exclusive:  # its workers wait for the answers to submissions
            await asyncio.Event().wait()
        return await evaluate(step, exclusive=exclusive)

    def fill_the_disk(record):
        record_step(record)
        log.is_unwritable = record.step == 2

    learner.dispatcher.evaluate, learner.signals.record_step = evaluate_late, fill_the_disk
    async with asyncio.timeout(30.0):
        assert await learner.run() is RunPhase.COMPLETE
    assert [each.step for each in read_metrics(tmp_path).evaluations] == [0]
    told = [each for each in read_events(tmp_path) if each.kind == "EvaluationWithoutResult"]
    assert len(told) == 2  # beside step 2, and at the end


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


BROKEN = Failure(cause=FailureCause.REWARD, exception_type="KeyError", message="'answer'")


async def test_the_steps_taken_before_an_environment_broke_are_saved(make_learner, tmp_path):
    tolerance = {"maxFailuresInARow": 4}
    learner = make_learner(failurePolicy=tolerance, steps=100)
    training = asyncio.create_task(learner.training.run(drain_s=0))
    working = asyncio.create_task(learner._work(None, serves_evaluations=True))
    while learner.dispatcher.policy_version < 2:
        await asyncio.sleep(0.001)
    working.cancel()
    for lease in learner.dispatcher.ledger.leases.all():
        learner.dispatcher.fail("w", lease.lease_id, BROKEN)
    for _ in range(4):
        learner.dispatcher.fail("w", "train-now-0", BROKEN)
    learner.clock.advance(TOLERANCE_S)
    learner.dispatcher.notify()
    with pytest.raises(TooManyFailuresError):
        await training
    step = learner.dispatcher.policy_version
    again = make_learner(failurePolicy=tolerance, steps=100)
    assert again.training.recovery.resume() == step >= 2
    # A run that has steps had responses: it is not judged as one that never worked.
    for _ in range(4):
        again.dispatcher.fail("w", "train-now-0", BROKEN)
    again.dispatcher.failures.check()
