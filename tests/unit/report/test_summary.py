import math

import pytest

from vcpo.records.journal import Metrics
from vcpo.report.summary import Grade, State, findings, headlines, state_of


def metrics_of(*steps, evaluations=()):
    return Metrics(steps=steps, evaluations=tuple(evaluations))


def headline(run, metrics, label, events=()):
    (found,) = [item for item in headlines(run, metrics, events) if item.label == label]
    return found.value, found.note


def findings_about(run, steps, words):
    return [
        (finding.grade, finding.text)
        for finding in findings(run, metrics_of(*steps))
        if words in finding.text
    ]


def test_a_run_is_complete_with_its_last_step(run, make_step):
    assert state_of(run, metrics_of(make_step(4))) is State.COMPLETE


def test_a_run_before_its_last_step_is_unfinished(run, make_step):
    assert state_of(run, metrics_of(make_step(3))) is State.UNFINISHED


def test_a_run_without_steps_is_empty_and_unchecked(run):
    assert state_of(run, metrics_of()) is State.EMPTY
    assert findings(run, metrics_of()) == ()


def test_accuracy_is_shown_before_and_after(run, make_evaluation):
    evaluations = [make_evaluation(0, 0.35), make_evaluation(2, 0.5), make_evaluation(4, 0.9)]
    metrics = metrics_of(evaluations=evaluations)
    assert headline(run, metrics, "Accuracy") == ("0.350 → 0.900", "held out, at step 4")


def test_a_single_evaluation_is_no_progress(run, make_evaluation):
    metrics = metrics_of(evaluations=[make_evaluation(0, 0.35)])
    assert headline(run, metrics, "Accuracy") == ("0.350", "held out, at step 0")


def test_wall_time_runs_from_the_first_record_to_the_last(run, make_step, make_event):
    steps = [
        make_step(1, time_unix_s=1000.0, tokens_per_s=100.0),
        make_step(2, time_unix_s=1192.0, tokens_per_s=300.0),
    ]
    value = headline(run, metrics_of(*steps), "Wall time", [make_event("lost", 1100.0)])
    assert value == ("3m 12s", "200 tokens/s on average")


def test_trajectories_name_every_reason_to_drop(run, make_step):
    metrics = metrics_of(make_step(4, leased=1097, consumed=1000, dropped={"lag": 2, "failed": 45}))
    assert headline(run, metrics, "Trajectories consumed") == (
        "1,000",
        "1,097 leased, 47 dropped (failed 45, lag 2)",
    )


def test_lag_is_the_mean_of_means_and_the_largest_maximum(run, make_step):
    steps = [make_step(1, lag_mean=1.0, lag_max=3), make_step(2, lag_mean=2.0, lag_max=7)]
    assert headline(run, metrics_of(*steps), "Lag, mean / max") == ("1.5 / 7", "versions; bound 8")


def test_the_lowest_ess_ratio_is_found_past_steps_without_one(run, make_step):
    steps = [make_step(1, ess_ratio=math.nan), make_step(2, ess_ratio=0.25), make_step(3)]
    value = headline(run, metrics_of(*steps), "Lowest ESS ratio")
    assert value == ("0.25", "at step 2; on-policy 0.80")


@pytest.mark.parametrize("label", ["Wall time", "Trajectories consumed", "Lowest ESS ratio"])
def test_headlines_of_an_empty_run_are_unknown(run, label):
    assert headline(run, metrics_of(), label)[0] == "-"


def test_a_healthy_run_has_only_good_findings(run, make_step):
    grades = [finding.grade for finding in findings(run, metrics_of(make_step()))]
    assert grades == [Grade.GOOD] * 5


def test_a_token_above_the_lag_bound_is_a_broken_promise(run, make_step):
    steps = [make_step(1, lag_max=8), make_step(2, lag_max=11)]
    assert findings_about(run, steps, "bound") == [
        (Grade.BAD, "1 step trained on tokens 11 versions old; the bound is 8.")
    ]


def test_a_token_at_the_lag_bound_is_allowed(run, make_step):
    ((grade, text),) = findings_about(run, [make_step(lag_max=8)], "bound")
    assert grade is Grade.GOOD
    assert "at most 8 of 8 versions" in text


def test_an_ess_ratio_below_the_floor_is_noticed_with_its_worst_step(run, make_step):
    low = make_step(2, ess_ratio=0.05, on_policy_ess_ratio=0.8, learning_rate_scale=0.25)
    lower = make_step(3, ess_ratio=0.02, on_policy_ess_ratio=0.8, learning_rate_scale=0.158)
    ((grade, text),) = findings_about(run, [make_step(1), low, lower], "ESS ratio")
    assert grade is Grade.NOTICE
    assert text.startswith("2 steps had an ESS ratio below the floor (10% of on-policy)")
    assert "0.020 at step 3, where the learning rate was scaled to 0.16" in text


def test_the_ess_floor_is_relative_to_the_on_policy_ratio(run, make_step):
    step = make_step(ess_ratio=0.05, on_policy_ess_ratio=0.4)
    ((grade, _),) = findings_about(run, [step], "ESS ratio")
    assert grade is Grade.GOOD


def test_a_run_that_never_updated_is_bad_news_with_the_cure(run, make_step):
    steps = [make_step(number, skipped="no_gradient") for number in range(1, 9)]
    ((grade, text),) = findings_about(run, steps, "made an update")
    assert grade is Grade.BAD
    assert text.startswith("No step made an update (8 of 8 were skipped), the model is unchanged")
    assert "Cure: a reward that distinguishes responses" in text


def test_a_run_that_stopped_updating_is_bad_news_with_the_cure(run, make_step):
    steps = [make_step(1), *(make_step(n, skipped="no_gradient") for n in range(2, 12))]
    ((grade, text),) = findings_about(run, steps, "made no update")
    assert grade is Grade.BAD
    assert text.startswith("The last 10 steps made no update: all responses to a prompt have")


def test_skipped_steps_are_counted_by_reason(run, make_step):
    steps = [
        make_step(1, skipped="diverged"),
        make_step(2, skipped="diverged"),
        make_step(3, skipped="no gradient"),
        make_step(4),
    ]
    assert findings_about(run, steps, "no update") == [
        (
            Grade.NOTICE,
            "3 steps made no update, marked ▲ below the curves: diverged (2), no gradient (1).",
        )
    ]


def test_trajectories_that_do_not_add_up_are_a_broken_promise(run, make_step):
    steps = [make_step(1), make_step(2, leased=103), make_step(3, leased=150)]
    ((grade, text),) = findings_about(run, steps, "add up")
    assert grade is Grade.BAD
    assert "since step 2" in text
    assert "is 3, not 0" in text


def test_a_learner_that_starves_is_noticed(run, make_step):
    ((grade, text),) = findings_about(run, [make_step(step_s=1.0, idle_s=3.0)], "waited")
    assert (grade, text) == (
        Grade.NOTICE,
        "The learner waited for data 75% of its time; more workers would help.",
    )


def test_the_worst_findings_come_first(run, make_step):
    steps = [make_step(1, lag_max=9, skipped="loss is not finite"), make_step(2)]
    grades = [finding.grade for finding in findings(run, metrics_of(*steps))]
    assert grades == [Grade.BAD, Grade.NOTICE, *[Grade.GOOD] * 3]
