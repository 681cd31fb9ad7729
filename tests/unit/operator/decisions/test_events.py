from typing import Any

import pytest

from tests.fixtures.operator.runs import KEY, UID
from vcpo.control.limits import ChangeKind
from vcpo_operator.decisions.events import transition_events
from vcpo_operator.observed.records import RunRecord
from vcpo_operator.observed.status import GroupStatus, LastDecision, RunStatus, StatusCondition

RECORD = RunRecord(
    key=KEY, uid=UID, generation=1, resource_version=1, deleting=False, spec={}, status={}
)


def status(kind: str, value: str, reason: str, transition_s: float = 1.0) -> RunStatus:
    condition = StatusCondition(
        type=kind, status=value, reason=reason, message="m.", transition_s=transition_s
    )
    return RunStatus(conditions=(condition,))


def events(before: RunStatus, after: RunStatus) -> list[dict[str, Any]]:
    return list(transition_events(RECORD, before, after, 1_700_000_000.0))


@pytest.mark.parametrize(
    ("kind", "reason"), [("Accepted", "InvalidSpec"), ("LearnerReady", "ImagePullBackOff")]
)
def test_a_bad_state_at_the_first_reconciliation_is_a_warning(kind: str, reason: str):
    (event,) = events(RunStatus(), status(kind, "False", reason))
    assert (event["type"], event["reason"]) == ("Warning", reason)


@pytest.mark.parametrize("reason", ["Degraded", "ApplyFailed"])
def test_a_run_that_is_no_longer_ready_is_warned_of_once(reason: str):
    bad = status("Ready", "False", reason)
    (event,) = events(status("Ready", "True", "Training"), bad)
    assert (event["type"], event["reason"]) == ("Warning", reason)
    assert events(bad, bad) == []


def test_a_cause_that_ready_only_repeats_is_one_event():
    first, second = (status(kind, "False", "InvalidSpec") for kind in ("Accepted", "Ready"))
    refused = RunStatus(conditions=(*first.conditions, *second.conditions))
    (event,) = events(RunStatus(), refused)
    assert event["message"] == "Accepted: m."


def test_nothing_new_is_no_event():
    assert events(status("Ready", "True", "X"), status("Ready", "True", "X", 9.0)) == []


def test_a_turn_is_one_event_about_the_run():
    (event,) = events(status("Ready", "False", "Initializing"), status("Ready", "True", "Training"))
    assert (event["type"], event["reason"], event["message"]) == ("Normal", "Training", "Ready: m.")
    assert event["involvedObject"]["uid"] == UID
    assert event["firstTimestamp"] == "2023-11-14T22:13:20Z"


def test_a_wait_is_no_warning():
    before = status("LearnerReady", "True", "PodReady")
    assert events(before, status("LearnerReady", "False", "PodPending"))[0]["type"] == "Normal"


def test_the_same_turn_at_the_same_time_has_the_same_name():
    before, after = status("Ready", "False", "A"), status("Ready", "True", "B")
    (first,), (second,) = events(before, after), events(before, after)
    assert first["metadata"]["name"] == second["metadata"]["name"]


def test_a_move_of_the_control_loop_is_an_event():
    ready = status("Ready", "True", "Training")
    two, three = (
        GroupStatus(name="main", desired=wanted, replicas=2, ready=2) for wanted in (2, 3)
    )
    before = ready.but(groups=(two,), lag_limit_steps=8)
    after = ready.but(groups=(three,), lag_limit_steps=4)
    assert [(event["reason"], event["message"]) for event in events(before, after)] == [
        ("Scaled", "Rollout group 'main' 2 -> 3 workers."),
        ("Throttled", "Lag limit 8 -> 4 versions."),
    ]


def test_a_run_far_off_policy_is_warned_of_and_its_recovery_is_not():
    calm, warned = status("Stable", "True", "Ok"), status("Stable", "True", "Warn")
    assert [event["type"] for event in events(calm, warned)] == ["Warning"]
    assert [event["type"] for event in events(warned, calm)] == ["Normal"]


@pytest.mark.parametrize(
    ("old", "new", "kind", "reason"),
    [
        (("True", "Fresh"), ("False", "Stale"), "Warning", "SignalsStale"),
        (("False", "Stale"), ("True", "Fresh"), "Normal", "SignalsFresh"),
        (("False", "Missing"), ("True", "Fresh"), "Normal", "SignalsFresh"),
    ],
)
def test_a_learner_that_falls_silent_or_answers_again_is_an_event(old, new, kind, reason):
    before, after = status("SignalsFresh", *old), status("SignalsFresh", *new)
    (event,) = events(before, after)
    assert (event["type"], event["reason"]) == (kind, reason)
    assert event["message"] == "SignalsFresh: m."


@pytest.mark.parametrize("kind", ["EssHealthy", "Stable", "SignalsFresh"])
def test_what_is_unknown_without_signals_is_news_only_when_it_is_bad(kind: str):
    good, unknown = status(kind, "True", "Good"), status(kind, "Unknown", "NoSignals")
    bad = status(kind, "False", "Bad")
    assert events(good, unknown) == events(unknown, good) == events(bad, unknown) == []
    assert [event["type"] for event in events(unknown, bad)] == ["Warning"]


def throttled(lag: int, **decided: Any) -> RunStatus:
    last = LastDecision(time_s=9.0, kind=ChangeKind.THROTTLED, **decided) if decided else None
    return RunStatus(lag_limit_steps=lag, last_decision=last)


LOW = {"before": 8, "after": 4, "reason": "the ESS ratio is 5.0% of the on-policy ratio"}
BETTER = {"before": 4, "after": 5, "reason": "the ESS ratio is 91.0% of the on-policy ratio"}


def test_a_throttle_is_a_warning_with_its_reason():
    (event,) = events(throttled(8), throttled(4, **LOW))
    assert (event["type"], event["reason"]) == ("Warning", "Throttled")
    sentence = "Lag limit 8 -> 4 versions: the ESS ratio is 5.0% of the on-policy ratio."
    assert event["message"] == sentence


def test_the_end_of_a_throttle_is_normal_and_has_a_reason_too():
    (event,) = events(throttled(4, **LOW), throttled(5, **BETTER))
    assert (event["type"], event["reason"]) == ("Normal", "Relaxed")
    sentence = "Lag limit 4 -> 5 versions: the ESS ratio is 91.0% of the on-policy ratio."
    assert event["message"] == sentence


def test_a_limit_that_an_edit_of_the_spec_lowered_was_not_decided():
    (event,) = events(throttled(4, **LOW), throttled(2, **LOW))
    assert (event["type"], event["message"]) == ("Normal", "Lag limit 4 -> 2 versions.")


def test_a_run_that_is_tried_again_says_so_and_nothing_else():
    failed, over = status("Failed", "True", "DeadlineExceeded"), status("Failed", "False", "X")
    (event,) = events(failed, over)
    assert (event["type"], event["reason"]) == ("Normal", "TriedAgain")


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("LearnerReady", ("True", "PodReady"), ("True", "LogDamaged")),
        ("Failed", ("False", "NotFailed"), ("True", "DeadlineExceeded")),
        ("RolloutsReady", ("True", "MinimumAvailable"), ("True", "PartiallyAvailable")),
    ],
)
def test_a_turn_for_the_worse_is_a_warning(kind, old, new):
    (event,) = events(status(kind, *old), status(kind, *new))
    assert (event["type"], event["reason"]) == ("Warning", new[1])


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("Ready", "False", "Initializing"),
        ("LearnerReady", "False", "PodPending"),
        ("Accepted", "True", "Accepted"),
        ("SignalsFresh", "False", "Missing"),
    ],
)
def test_a_run_that_begins_as_all_runs_do_makes_no_noise(kind, value, reason):
    assert events(RunStatus(), status(kind, value, reason)) == []
