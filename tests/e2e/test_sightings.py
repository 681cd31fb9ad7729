"""The counts that the end-to-end run takes of the objects that it observes."""

from tests.e2e.cluster import shortfalls
from tests.e2e.sightings import Sightings

PASSING = {
    "conditions": {"Complete": "Succeeded"},
    "scaled_up": 1,
    "scaled_down": 1,
    "replicas_seen": {"min": 1, "max": 2},
    "throttle_events": 1,
    "throttle_reasons": ["the ESS ratio is 5.0% of the on-policy ratio."],
    "accuracy_before": 0.4,
    "accuracy_after": 0.8,
    "left_behind": [],
    "orphans": 0,
    "log_lines": {"learner": 1, "rollout": 1, "operator": 1},
    "unreadable_log_lines": [],
}


def run(*, lag=6, step=0, **conditions):
    listed = [
        {"type": kind, "status": status, "reason": "Why"} for kind, status in conditions.items()
    ]
    return {"status": {"step": step, "admissionLagSteps": lag, "conditions": listed}}


def deployment(wanted, ready=0, *, paused=False):
    return {
        "spec": {"replicas": wanted, "paused": paused},
        "status": {"readyReplicas": ready},
    }


def test_only_lowering_the_admission_lag_is_a_throttle():
    seen = Sightings()
    for lag in (6, 3, 3, 4, 2):
        seen.see_run(run(lag=lag), 0.0)
    assert seen.throttles == 2


def test_a_run_is_ready_when_it_first_says_so():
    seen = Sightings()
    for time_s, ready in ((1.0, "False"), (2.0, "True"), (3.0, "True")):
        seen.see_run(run(Ready=ready), time_s)
    assert seen.ready_s == 2.0


def test_scaling_is_counted_by_its_direction():
    seen = Sightings()
    for wanted in (1, 2, 2, 3, 1):
        seen.see_deployment(deployment(wanted))
    assert (seen.ups, seen.downs) == (2, 1)


def test_a_deployment_that_is_being_set_up_does_not_scale():
    seen = Sightings()
    seen.see_deployment(deployment(1, paused=True))
    seen.see_deployment(deployment(3))
    assert seen.ups == 0


def test_taking_a_finished_run_down_is_no_scaling():
    seen = Sightings()
    seen.see_deployment(deployment(2))
    seen.see_run(run(Complete="True"), 0.0)
    seen.see_deployment(deployment(0))
    assert seen.downs == 0


def test_a_result_over_every_bar_has_no_shortfall():
    assert shortfalls(PASSING) == []


def test_each_missed_bar_is_reported():
    assert shortfalls({**PASSING, "orphans": 1, "scaled_down": 0}) == [
        "workers must be removed at least once",
        "no process may be left",
    ]
