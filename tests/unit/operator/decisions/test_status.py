"""The status of a run: what is kept, counted and written, and when."""

import pytest

from tests.fixtures.operator.runs import make_run, pod, signals
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.limits import ChangeKind
from vcpo_operator.decisions import status
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.observed.status import (
    ContainerEnd,
    CountedPod,
    GroupStatus,
    LastDecision,
    LearnerStatus,
    Numbers,
    RunStatus,
    StatusCondition,
)

FULL = RunStatus(
    observed_generation=3,
    conditions=(
        StatusCondition(
            type="Ready",
            status="True",
            reason="Training",
            message="The run trains.",
            transition_s=1_700_000_000.0,
            observed_generation=3,
        ),
    ),
    start_s=1_700_000_000.0,
    first_step_s=1_700_000_060.0,
    drain_s=1_700_000_080.0,
    updated_s=1_700_000_090.0,
    lag_limit_steps=4,
    last_decision=LastDecision(
        time_s=1_700_000_070.0,
        kind=ChangeKind.THROTTLED,
        before=8,
        after=4,
        reason="the ESS ratio is 5.0% of the on-policy ratio",
    ),
    learner=LearnerStatus(
        pods="1/2",
        restarts=2,
        counted=(CountedPod(uid="u", restarts=1), CountedPod(uid="v", restarts=2)),
        group=("u", "v"),
        replaced=("w",),
        failures=1,
        furthest_step=4,
    ),
    **dict(
        Numbers.of(
            signals(
                ess_ratio=0.25,
                reward_mean=0.123456,
                warning_score=0.75,
                warning_level=WarningLevel.CRITICAL,
            )
        )
    ),
    groups=(GroupStatus(name="main", desired=3, replicas=3, ready=2, scaled_s=1_700_000_030.0),),
    control={"throttle": {"healthy_steps": 1}},
)


def test_a_status_reads_back_as_it_was_written():
    assert RunStatus.from_dict(FULL.to_dict()).to_dict() == FULL.to_dict()
    assert RunStatus.from_dict(FULL.to_dict()).learner == FULL.learner


def test_signals_are_shown_by_their_names_in_the_status_without_what_is_unknown():
    shown = FULL.to_dict()
    assert (shown["step"], shown["essRatio"], shown["rewardMean"]) == (5, 0.25, 0.1235)
    assert shown["trajectories"] == {"buffered": 10, "inFlight": 10}
    assert shown["lag"] == {"p50": 1, "max": 3}
    assert shown["warning"] == {"level": "critical", "score": 0.75}
    assert "evaluationAccuracy" not in shown
    before = RunStatus(**dict(Numbers.of(signals(step=0)))).to_dict()
    assert not {"learningRate", "warning"} & before.keys()


def test_ready_and_desired_workers_stand_in_one_column():
    assert FULL.to_dict()["workers"] == "2/3"


def test_the_last_decision_is_written_with_its_reason():
    assert FULL.to_dict()["lastDecision"] == {
        "time": "2023-11-14T22:14:30Z",
        "kind": "Throttled",
        "from": 8,
        "to": 4,
        "reason": "the ESS ratio is 5.0% of the on-policy ratio",
    }


def test_a_status_of_somebody_else_is_refused():
    with pytest.raises(ValueError, match="lastTransitionTime"):
        RunStatus.from_dict({"conditions": [{"type": "Ready"}]})


def test_the_clock_of_a_run_starts_once():
    spec = make_run().spec
    first = status.with_clocks(RunStatus(), spec, ObservedState(), None, 100.0)
    assert status.with_clocks(first, spec, ObservedState(), None, 200.0).start_s == 100.0


def test_the_clock_restarts_after_a_suspension():
    ran = RunStatus(start_s=1.0, admission_s=2.0)
    rested = status.with_clocks(ran, make_run(suspend=True).spec, ObservedState(), None, 50.0)
    assert rested.admission_s is None
    assert status.with_clocks(rested, make_run().spec, ObservedState(), None, 60.0).start_s == 60.0


PLACED = ObservedState(
    pods=(pod("demo-learner-0", Role.LEARNER, node="a"), pod("demo-rollout-main-x", node="b"))
)
GATED = ObservedState(pods=(pod("demo-learner-0", Role.LEARNER, is_gated=True), PLACED.pods[1]))


@pytest.mark.parametrize(
    ("observed", "spec", "admission_s"),
    [
        (PLACED, {}, 60.0),
        (ObservedState(pods=PLACED.pods[:1]), {}, None),
        (ObservedState(pods=PLACED.pods[1:]), {}, None),
        (GATED, {}, None),
        (
            ObservedState(pods=PLACED.pods[:1]),
            {"rollouts": [{"name": "main", "minReplicas": 0}]},
            60.0,
        ),
    ],
    ids=["both", "no worker", "no learner", "gated", "no worker wanted"],
)
def test_a_run_is_admitted_once_the_learner_and_a_worker_have_a_node(
    observed: ObservedState, spec: dict[str, object], admission_s: float | None
):
    waiting = RunStatus(start_s=1.0)
    started = status.with_clocks(waiting, make_run(**spec).spec, observed, None, 60.0)
    assert started.admission_s == admission_s


def test_an_admission_stands_unless_the_queue_takes_it_back_before_the_first_step():
    admitted = RunStatus(start_s=1.0, admission_s=2.0)
    spec = make_run().spec
    assert status.with_clocks(admitted, spec, ObservedState(), None, 60.0).admission_s == 2.0
    assert status.with_clocks(admitted, spec, GATED, None, 60.0).admission_s is None
    trained = admitted.but(first_step_s=3.0)
    assert status.with_clocks(trained, spec, GATED, None, 60.0).admission_s == 2.0


def test_a_run_that_is_tried_again_starts_from_nothing_but_how_its_learner_ended():
    end = ContainerEnd(pod="p", exit_code=1, reason="Error", message="m")
    failed = StatusCondition(
        type="Failed", status="True", reason="X", message="m.", transition_s=1.0
    )
    before = FULL.but(
        conditions=(*FULL.conditions, failed),
        completion_s=9.0,
        learner=LearnerStatus(restarts=4, failures=4, furthest_step=9, last_end=end),
    )
    again = status.as_new_attempt(before)
    assert not again.holds("Failed")
    assert (again.start_s, again.admission_s, again.first_step_s) == (None, None, None)
    assert (again.completion_s, again.drain_s) == (None, None)
    assert again.learner == before.learner.but(failures=0)
    assert again.step == FULL.step


def test_the_first_step_is_dated_when_it_is_seen():
    started = status.with_clocks(
        RunStatus(start_s=1.0), make_run().spec, ObservedState(), signals(step=1), 60.0
    )
    assert started.first_step_s == 60.0


def test_numbers_stay_when_the_learner_is_silent():
    assert status.with_signals(FULL, make_run().spec, None) == FULL


def test_the_status_says_what_is_the_matter_and_what_to_do():
    spec = make_run().spec
    critical = signals(step=1, warning_level=WarningLevel.CRITICAL)
    told = status.with_signals(RunStatus(), spec, critical).verdict
    assert told.startswith("The early warning is critical: few trajectories make the updates. ")
    old = critical.at_age(61.0)
    assert status.with_signals(RunStatus(), spec, old).verdict.startswith("The learner does not")


def test_a_group_shows_what_is_wanted_and_what_is_there():
    spec = make_run(rollouts=[{"name": "main", "maxReplicas": 4}]).spec
    after = status.with_groups(RunStatus(), spec, ObservedState(), desired={"main": 3}, now_s=9.0)
    assert after.groups == (GroupStatus(name="main", desired=3, replicas=0, ready=0),)


def test_a_group_is_dated_when_its_number_changes():
    spec = make_run(rollouts=[{"name": "main", "maxReplicas": 4}]).spec
    after = status.with_groups(FULL, spec, ObservedState(), desired={"main": 4}, now_s=9.0)
    assert after.groups[0].scaled_s == 9.0


def with_step(step: int) -> RunStatus:
    return FULL.but(step=step)


def test_the_same_status_is_never_written_again():
    assert not status.needs_write(FULL, FULL, 1e12)


@pytest.mark.parametrize(("later_s", "due"), [(29.0, False), (30.0, True)])
def test_numbers_are_written_every_30_s_at_most(later_s: float, due: bool):
    assert status.needs_write(FULL, with_step(6), FULL.updated_s + later_s) is due


@pytest.mark.parametrize(
    "change",
    [
        {"observed_generation": 4},
        {"lag_limit_steps": 2},
        {"completion_s": 1_700_000_091.0},
        {"learner": LearnerStatus(restarts=3)},
        {"groups": (GroupStatus(name="main", desired=4, replicas=3, ready=2),)},
        {"conditions": ()},
    ],
)
def test_what_somebody_may_act_on_is_written_at_once(change: dict[str, object]):
    assert status.needs_write(FULL, FULL.but(**change), FULL.updated_s)


def test_how_near_a_collapse_a_run_is_is_written_at_once():
    critical, dead = (
        FULL.but(conditions=(FULL.conditions[0].but(type="Stable", reason=reason),))
        for reason in ("Critical", "Dead")
    )
    assert status.needs_write(critical, dead, FULL.updated_s)


def test_a_control_reason_that_turns_with_every_poll_waits_like_a_number():
    balanced, starved = (
        FULL.but(conditions=(FULL.conditions[0].but(type="LearnerFed", reason=reason),))
        for reason in ("Balanced", "AtMinimum")
    )
    assert not status.needs_write(balanced, starved, FULL.updated_s)
