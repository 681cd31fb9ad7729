"""What is the matter with a run: by its signals, by its records, and how it ended."""

from dataclasses import replace

import pytest

from tests.fixtures.records import EVALUATION, STEP, evaluation_record, step_record
from tests.fixtures.signals import run_signals_of
from vcpo.algo.health.collapse import RewardWatch
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import parse_run
from vcpo.control.signals import RunSignals
from vcpo.judgement import (
    Evidence,
    Grade,
    Measure,
    ended_phase,
    judgements,
    lasting_collapse,
    recorded_phase,
    run_collapse,
)
from vcpo.local.terminal.summary import Ending, outcome_of_complete
from vcpo.records.journal import EventRecord, Metrics

RUN = parse_run("""
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 4
  algorithm: {maxPolicyLagSteps: 8}
""")
QUIET = RUN.spec.model_copy(
    update={"health": RUN.spec.health.model_copy(update={"enabled": False})}
)


def signals(**changes) -> RunSignals:
    values = {"step": 3, "policy_version": 3, "batch_trajectories": 16, "lag_limit_steps": 8}
    return run_signals_of(**{**values, **changes})


def judged(phase="running", spec=RUN.spec, metrics=(), **changes):
    steps = Metrics(steps=tuple(metrics), evaluations=())
    return judgements(Evidence(spec=spec, signals=signals(**changes), phase=phase, metrics=steps))


def steps_of(*changes):
    """Steps 1, 2, ... of a run that goes well, but for changes."""
    good = step_record(
        lag_max=3, leased=20, in_flight=4, buffered=0, consumed=16, dropped={}, idle_s=0.0
    )
    return [replace(good, step=at, **each) for at, each in enumerate(changes, start=1)]


def test_a_run_that_trains_is_good_and_asks_for_nothing():
    (found,) = judged(warning_level=WarningLevel.OK, metrics=steps_of({}, {}))
    assert (found.name, found.grade, found.todo) == ("well", Grade.GOOD, "")


@pytest.mark.parametrize(
    ("name", "grade", "changes"),
    [
        ("failed", Grade.BAD, {"phase": "failed", "failure": "out of memory"}),
        ("collapsed", Grade.BAD, {"phase": "collapsed"}),
        ("no update", Grade.BAD, {"skipped": "low_ess", "skipped_steps": 12}),
        ("complete", Grade.GOOD, {"phase": "complete"}),
        ("interrupted", Grade.NOTICE, {"phase": "interrupted"}),
        ("silent", Grade.BAD, {"phase": "silent"}),
        ("starting", Grade.NOTICE, {"phase": "restarting"}),
        ("lag", Grade.BAD, {"lag_max": 9}),
        ("dead", Grade.BAD, {"warning_level": WarningLevel.DEAD}),
        ("critical", Grade.BAD, {"warning_level": WarningLevel.CRITICAL}),
        (
            "generations",
            Grade.BAD,
            {"failures_in_a_row": 3, "generation_failure": "reward: 503"},
        ),
        ("rollback", Grade.NOTICE, {"rollback": "step 3 went back to step 2"}),
        ("warning", Grade.NOTICE, {"warning_level": WarningLevel.WARN}),
        ("mismatch", Grade.NOTICE, {"mismatch": "0.2 nats"}),
        ("set aside", Grade.NOTICE, {"set_aside": "main-1"}),
        ("backoff", Grade.NOTICE, {"learning_rate_backoff": 0.25}),
        ("throttled", Grade.NOTICE, {"lag_limit_steps": 4}),
        ("cut", Grade.NOTICE, {"cut_responses_ratio": 0.5}),
        ("idle", Grade.NOTICE, {"learner_idle_ratio": 0.9}),
    ],
)
def test_each_matter_that_signals_tell_of(name, grade, changes):
    (found,) = judged(**changes)
    assert (found.name, found.grade) == (name, grade)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("lag", [{"lag_max": 9}, {"lag_max": 11}, {}], "2 steps trained on tokens up to 11"),
        ("accounts", [{}, {"leased": 23}], "since step 2: leased minus in flight, buffered"),
        ("rollback", [{}, {"rollbacks": 1}, {"rollbacks": 2}], "2 times, first at step 2"),
        ("warning", [{"warning_level": "warn"}, {}], "warned at 1 step, first at step 1"),
        ("warning", [{"warning_level": "dead"}, {}], "was critical at 1 step"),
        ("ess", [{"ess_ratio": 0.07, "on_policy_ess_ratio": 0.8}], "1 step had an ESS ratio below"),
        (
            "skips",
            [{"skipped": "low_ess"}, {}],
            "1 step made no update: the ESS ratio is",
        ),
        ("idle", [{"idle_s": 9.0, "step_s": 1.0}], "waits for data"),
    ],
)
def test_each_matter_that_records_tell_of(name, changes, words):
    (found,) = judged(metrics=steps_of(*changes))
    assert found.name == name
    assert words in found.why


@pytest.mark.parametrize(
    ("leased", "failed", "is_told"),
    [(8, 8, False), (64, 16, True), (10_000, 200, False), (10_000, 201, True)],
)
def test_failed_responses_are_told_from_two_percent_and_the_second_group_on(
    leased, failed, is_told
):
    dropped = {"generation_failed": failed, "surplus": 50}
    found = judged(leased=leased, dropped=dropped, generation_failure="reward: KeyError (a.py:9)")
    assert [each.name for each in found] == (["left out"] if is_told else ["well"])
    if is_told:
        assert str(found[0]).startswith(
            f"{failed:,} of {leased:,} responses failed and were left out with their groups; last:"
            " reward: KeyError (a.py:9)."
        )


def test_the_end_of_a_run_names_the_last_of_its_failed_responses():
    events = [
        EventRecord(time_unix_s=1.0, source="learner", kind="GenerationFailed", message=each)
        for each in ("reward: old", "reward: ValueError: boom (rw2.py:9)")
    ]
    steps = steps_of({}, {"leased": 60, "dropped": {"generation_failed": 40}})
    outcome = outcome_of_complete(RUN, Metrics(steps=tuple(steps), evaluations=()), events)
    assert outcome.ending is Ending.COMPLETE
    assert "40 of 60 responses failed" in outcome.message
    assert "last: reward: ValueError: boom (rw2.py:9). Fix the cause" in outcome.message


@pytest.mark.parametrize(
    ("number", "method", "changes"),
    [
        (31, "vcpo2", {}),
        (32, "vcpo", {}),
        (32, "vcpo2", {"learning_rate_scale": 0.3}),
        (32, "vcpo2", {"learning_rate_scale": 0.0}),
        (32, "vcpo2", {"warning_level": "warn"}),
        (32, "vcpo2", {"reward_window_error": 0.15}),
        (32, "vcpo2", {"skipped": None}),
    ],
    ids=str,
)
def test_a_region_that_holds_the_rate_low_while_rewards_rise_is_told(number, method, changes):
    good = {"learning_rate_scale": 1 / 7, "reward_window_error": 0.01}
    means = [None] * 9 + [0.01 * at for at in range(number - 9)]
    algorithm = RUN.spec.algorithm.model_copy(update={"method": method})
    spec = RUN.spec.model_copy(update={"algorithm": algorithm})
    steps = steps_of(*({"reward_window_mean": mean, **good, **changes} for mean in means))
    found = [str(each) for each in judged(spec=spec, metrics=steps) if each.name == "held rate"]
    told = (
        "The rate is held at 1/7 for 32 steps while the reward rises. If it learns at the whole "
        "rate without lag"
    )
    assert [each.split(",")[0] for each in found] == ([told] if "skipped" in changes else [])


def test_a_step_whose_weights_have_no_value_has_no_low_ess():
    assert [each.name for each in judged(metrics=steps_of({"ess_ratio": 0.0}))] == ["well"]


def test_the_most_urgent_matter_comes_first():
    several = {"warning_level": WarningLevel.CRITICAL, "lag_limit_steps": 0}
    assert [each.name for each in judged(phase="silent", **several)] == [
        "silent",
        "critical",
        "throttled",
    ]


def test_what_to_do_about_a_critical_run_depends_on_its_guards():
    critical = {"warning_level": WarningLevel.CRITICAL}
    assert judged(**critical)[0].todo.startswith("Wait ten steps")
    assert judged(spec=QUIET, **critical)[0].todo.startswith("Halve algorithm.maxPolicyLagSteps")
    assert judged(phase="failed", **critical)[1].todo.startswith("Begin anew")


def metrics_of(rewards=(), accuracies=(), levels=(), consumed_per_step=128):
    """Steps 1, 2, ... with these rewards and warning levels; evaluations at steps 0, 10, ..."""
    watch, windows = RewardWatch(), []
    for reward in rewards:
        num_good = round(consumed_per_step * reward)
        watch = watch.observe({"": [1.0] * num_good + [0.0] * (consumed_per_step - num_good)})
        windows.append(watch.last)
    known = {**dict.fromkeys(range(len(rewards)), "ok"), **dict(enumerate(levels))}
    return Metrics(
        steps=tuple(
            step_record(
                step=index + 1,
                reward_mean=reward,
                reward_window_mean=windows[index] and windows[index].value,
                reward_window_error=windows[index].error if windows[index] else 0.0,
                warning_level=known[index],
                consumed=consumed_per_step * (index + 1),
            )
            for index, reward in enumerate(rewards)
        ),
        evaluations=tuple(
            evaluation_record(step=10 * index, accuracy=accuracy, num_prompts=512)
            for index, accuracy in enumerate(accuracies)
        ),
    )


class TestCollapse:
    def test_the_training_reward_is_judged_over_windows_of_ten_steps(self):
        # Windows end at steps 10 to 30; the first below half of 1.0 holds four ones and six zeros.
        found = run_collapse(metrics_of([1.0] * 10 + [0.0] * 20))
        assert (found.measure, found.fall.step, found.fall.value) == (Measure.REWARD, 16, 0.4)

    def test_the_chance_of_few_responses_is_no_collapse(self):
        low = ((0, 0.0625), (7, 0.0))
        few = [evaluation_record(step=at, accuracy=one, num_prompts=16) for at, one in low]
        assert run_collapse(Metrics(steps=(), evaluations=tuple(few))) is None
        many = [replace(each, num_prompts=512) for each in few]
        found = run_collapse(Metrics(steps=(), evaluations=tuple(many)))
        assert found.measure is Measure.ACCURACY

    def test_one_that_lasts_comes_before_one_that_was_overcome(self):
        found = run_collapse(metrics_of([1.0] * 10 + [0.0] * 10 + [1.0] * 10, [0.1, 0.9, 0.2]))
        assert (found.measure, found.fall.has_recovered) == (Measure.ACCURACY, False)

    def test_it_is_told_with_what_fell_when_it_was_warned_of_and_what_to_do(self):
        told = lasting_collapse(metrics_of([0.5] * 20, [0.3, 0.8, 0.1], ["ok"] * 3 + ["critical"]))
        assert "held-out reward fell from 0.8 at step 10 to 0.1 at step 20" in told
        assert "The early warning was critical from step 4." in told
        assert "Fix: a smaller optimizer.learningRate" in told

    def test_a_model_that_no_step_changed_has_not_collapsed(self):
        metrics = metrics_of([0.5] * 20, [0.8, 0.1])
        assert ended_phase(metrics) == "collapsed"
        steps = tuple(replace(step, skipped="no_gradient") for step in metrics.steps)
        assert ended_phase(replace(metrics, steps=steps)) == "no update"
        assert lasting_collapse(replace(metrics, steps=steps)) == ""


class TestEnd:
    @pytest.mark.parametrize(
        ("taken", "kinds", "at_work", "rests"),
        [
            (0, [], "starting", "interrupted"),
            (3, [], "running", "interrupted"),
            (4, [], "complete", "complete"),
            (3, ["Started", "Draining"], "running", "interrupted"),
            (4, ["Started", "Draining"], "running", "interrupted"),  # without its last evaluation
            (4, ["Started", "Draining", "Started", "Complete"], "complete", "complete"),
            (2, ["Started", "Failed"], "failed", "failed"),
            (2, ["Started", "Failed", "Started"], "running", "interrupted"),
        ],
        ids=str,
    )
    def test_records_say_how_far_a_run_is_and_the_lock_whether_it_works(
        self, taken, kinds, at_work, rests
    ):
        events = [
            EventRecord(time_unix_s=1.0, source="host", kind=kind, message="") for kind in kinds
        ]
        steps = tuple(replace(STEP, step=number) for number in range(1, taken + 1))
        metrics = Metrics(steps=steps, evaluations=())
        for phase, is_at_work in ((at_work, True), (rests, False)):
            assert recorded_phase(RUN.spec, metrics, events, is_at_work=is_at_work) == phase

    @pytest.mark.parametrize(
        ("skipped", "status", "words"),
        [
            ([None, "no_gradient", None], 0, ""),
            (["no_gradient"] * 8, 3, "No step made an update (8 of 8 were skipped): all"),
            ([None, *["no_gradient"] * 10], 0, "The last 10 steps made no update: all rewards"),
            ([None, *["no_gradient"] * 9], 0, ""),
            ([], 0, ""),
        ],
        ids=str,
    )
    def test_a_run_of_skipped_steps_says_so(self, skipped, status, words):
        steps = steps_of(*({"skipped": reason} for reason in skipped))
        outcome = outcome_of_complete(RUN, Metrics(steps=tuple(steps), evaluations=()))
        assert int(outcome.ending) == status
        assert outcome.message.startswith(words) if words else outcome.message == ""

    @pytest.mark.parametrize(
        ("accuracies", "level", "ending", "words"),
        [
            ([0.9, 0.1], "ok", Ending.COLLAPSED, "The run collapsed: the held-out reward fell"),
            ([0.9, 0.1, 0.8], "ok", Ending.COMPLETE, "The run collapsed, and recovered: the"),
            ([0.9], "critical", Ending.COMPLETE, "The early warning is critical"),
            ([0.9], "ok", Ending.COMPLETE, ""),
        ],
    )
    def test_a_collapse_has_its_exit_status_and_its_words(self, accuracies, level, ending, words):
        told = [replace(EVALUATION, step=at, accuracy=each) for at, each in enumerate(accuracies)]
        metrics = Metrics(steps=tuple(steps_of({"warning_level": level})), evaluations=tuple(told))
        outcome = outcome_of_complete(RUN, metrics)
        assert outcome.ending is ending
        assert outcome.message.startswith(words) if words else outcome.message == ""
