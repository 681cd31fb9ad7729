"""VCPORun objects as rows, and the output of kubectl as objects."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.operator.runs import KEY
from vcpo.monitor.cluster_logs import (
    GROUP_LABEL,
    ROLE_LABEL,
    RUN_LABEL,
    log_arguments,
    logged_events,
)
from vcpo.monitor.cluster_runs import JsonStream, has_ended, object_row
from vcpo.monitor.kubectl import Scope
from vcpo_operator import names

NOW_S = 1_700_000_100.0
STATUS = {
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Training", "message": "It trains."},
        {"type": "Stable", "status": "False", "reason": "Critical", "message": "A collapse."},
    ],
    "startTime": "2023-11-14T22:13:20Z",
    "updateTime": "2023-11-14T22:14:50Z",
    "step": 120,
    "essRatio": 0.23,
    "onPolicyEssRatio": 0.92,
    "rewardMean": 0.4,
    "tokensPerSecond": 1234.5,
    "learningRateScale": 0.5,
    "evaluationAccuracy": 0.38,
    "admissionLagSteps": 4,
    "lag": {"p50": 2, "max": 5},
    "warning": {"level": "critical", "score": 0.71},
    "trajectories": {"buffered": 3, "inFlight": 5},
    "rollouts": [
        {"name": "a", "desiredReplicas": 2, "readyReplicas": 1},
        {"name": "b", "desiredReplicas": 1, "readyReplicas": 1},
    ],
}


def run_object(status: object = STATUS) -> dict:
    return {
        "kind": "VCPORun",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace},
        "spec": {"steps": 400, "algorithm": {"maxPolicyLagSteps": 12}},
        "status": status,
    }


def test_a_run_of_a_cluster_has_the_numbers_of_a_local_one():
    row = object_row(run_object(), NOW_S)
    view = row.view
    assert (row.place, view.phase, view.step, view.total_steps) == ("ml/demo", "Training", 120, 400)
    assert (view.reward_mean, view.accuracy, view.relative_ess_ratio) == (0.4, 0.38, 0.25)
    assert (view.warning_level, view.warning_score) == ("critical", 0.71)
    assert (view.lag_p50, view.lag_max, view.admission_lag_steps, view.lag_bound) == (2, 5, 4, 12)
    assert (view.workers_ready, view.workers_desired) == (2, 3)
    assert (view.buffered, view.in_flight, view.tokens_per_s) == (3, 5, 1234.5)
    assert (view.elapsed_s, row.age_s) == (100.0, 10.0)
    assert view.notices == ("Stable (Critical): A collapse.",)


def test_a_run_that_the_operator_has_not_seen_yet_is_pending():
    row = object_row(run_object(status=None), NOW_S)
    assert (row.view.phase, row.view.step, row.age_s) == ("Pending", 0, None)


@pytest.mark.parametrize(
    ("kind", "ended"), [("Complete", True), ("Failed", True), ("Ready", False)]
)
def test_a_run_ends_complete_or_failed(kind, ended):
    condition = {"type": kind, "status": "True", "reason": "R", "message": "M."}
    assert has_ended(run_object({"conditions": [condition]})) is ended


@given(st.lists(st.dictionaries(st.text(), st.text() | st.none()), max_size=4), st.data())
def test_objects_are_the_same_however_their_text_is_cut(objects, data):
    text = "\n".join(json.dumps(each, indent=4) for each in objects) + "\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    stream, read = JsonStream(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        read += stream.feed(text[start:end])
    assert read == objects


def test_the_labels_of_pods_are_the_operators():
    expected = (names.RUN_LABEL, names.ROLE_LABEL, names.GROUP_LABEL)
    assert expected == (RUN_LABEL, ROLE_LABEL, GROUP_LABEL)


@pytest.mark.parametrize(
    ("part", "selector"),
    [
        (None, "vcpo.dev/run=demo"),
        ("learner", "vcpo.dev/run=demo,vcpo.dev/role=learner"),
        ("main", "vcpo.dev/run=demo,vcpo.dev/group=main"),
    ],
)
def test_a_part_of_a_run_is_chosen_by_its_labels(part, selector):
    arguments = log_arguments(Scope(namespace="ml"), "demo", part, tail=5, follow=True)
    assert f"--selector={selector}" in arguments
    assert {"--namespace=ml", "--tail=5", "--follow"} < set(arguments)


def test_events_of_the_learner_are_found_in_its_log():
    lines = [
        "Traceback of something",
        json.dumps({"time": "2023-11-14T22:13:20.500Z", "level": "INFO", "message": "step 1/3"}),
        json.dumps(
            {
                "time": "2023-11-14T22:13:21.500Z",
                "level": "WARNING",
                "message": "Throttled: Admission lag 8 -> 4 versions.",
                "event": "Throttled",
            }
        ),
        '{"time": "cut',
    ]
    (event,) = logged_events(lines)
    assert (event.time_unix_s, event.source, event.kind) == (
        1_700_000_001.5,
        "learner",
        "Throttled",
    )
    assert event.message == "Admission lag 8 -> 4 versions."
