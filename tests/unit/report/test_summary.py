import math

import pytest

from vcpo.records.journal import Metrics
from vcpo.report.recorded_run import RecordedRun
from vcpo.report.summary import headlines


def metrics_of(*steps, evaluations=()):
    return Metrics(steps=steps, evaluations=tuple(evaluations))


def headline(run, metrics, label, events=()):
    recorded = RecordedRun(run=run, metrics=metrics, events=tuple(events))
    (found,) = [item for item in headlines(recorded) if item.label == label]
    return found.value, found.note


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


def test_wall_time_includes_the_start_and_leaves_out_the_pause_before_a_resume(
    run, make_step, make_event
):
    events = [
        make_event("", 1000.0, kind="Started"),
        make_event("", 1030.0, kind="Draining"),
        make_event("", 5000.0, kind="Started"),
    ]
    steps = [make_step(1, time_unix_s=1020.0), make_step(2, time_unix_s=5040.0)]
    value, note = headline(run, metrics_of(*steps), "Wall time", events)
    assert (value, note) == ("1m 10s", "200 tokens/s on average, in 2 sessions")


def test_trajectories_name_every_reason_to_drop(run, make_step):
    metrics = metrics_of(make_step(4, leased=1097, consumed=1000, dropped={"lag": 2, "failed": 45}))
    assert headline(run, metrics, "Trajectories consumed") == (
        "1,000",
        "1,097 leased, 47 dropped (failed 45, lag 2)",
    )


def test_lag_is_the_mean_of_means_and_the_largest_maximum(run, make_step):
    steps = [make_step(1, lag_mean=1.0, lag_max=3), make_step(2, lag_mean=2.0, lag_max=7)]
    assert headline(run, metrics_of(*steps), "Lag, mean / max") == ("1.5 / 7", "versions; limit 8")


def test_the_lowest_ess_ratio_is_found_past_steps_without_one(run, make_step):
    without = [make_step(1, ess_ratio=math.nan), make_step(4, ess_ratio=0.0, skipped="nan")]
    steps = [without[0], make_step(2, ess_ratio=0.25), make_step(3), without[1]]
    value = headline(run, metrics_of(*steps), "Lowest ESS ratio")
    assert value == ("0.25", "at step 2; on-policy 0.80")


@pytest.mark.parametrize("label", ["Wall time", "Trajectories consumed", "Lowest ESS ratio"])
def test_headlines_of_an_empty_run_are_unknown(run, label):
    assert headline(run, metrics_of(), label)[0] == "-"
