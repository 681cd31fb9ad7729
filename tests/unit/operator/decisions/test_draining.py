"""When a learner has to drain, and how long its workers stay."""

import dataclasses
from typing import Any

import pytest

from tests.fixtures.operator.runs import make_run, signals
from vcpo.wire.phase import RunPhase
from vcpo_operator.children import Kind
from vcpo_operator.decisions.lifecycle import LearnerDrain, LifecyclePhase, RunVerdict, decide_drain
from vcpo_operator.observed.records import (
    ObservedChild,
    ObservedGroup,
    ObservedLearner,
    ObservedState,
)

NOW_S = 1_000.5
CHILD = ObservedChild(
    kind=Kind.DEPLOYMENT, name="any", uid="u", owner_uid=None, digest=None, version=1
)


def at_work(workers: int = 2, learners: int = 1) -> ObservedState:
    group = ObservedGroup(child=CHILD, group="main", replicas=workers, ready=workers)
    learner = ObservedLearner(child=CHILD, replicas=learners, is_up_to_date=True)
    return ObservedState(learner=learner, groups={"main": group})


def decide(phase: LifecyclePhase = LifecyclePhase.SUSPEND, **given: Any) -> LearnerDrain | None:
    chosen = {"observed": at_work(), "signals": signals(), "since_s": None, "now_s": NOW_S, **given}
    spec = make_run(learner={"drainSeconds": 90}, **chosen.pop("spec", {})).spec
    return decide_drain(spec, RunVerdict(phase=phase, message="why"), **chosen)


def test_workers_stay_while_the_learner_trains_for_its_own_time_at_most():
    assert decide() == LearnerDrain(reason="the run is suspended", since_s=1_000.0, until_s=1_090.0)


def test_the_wait_counts_from_when_it_began():
    found = decide(since_s=950.0)
    assert found is not None
    assert (found.since_s, found.until_s) == (950.0, 1_040.0)


def test_the_wait_ends_with_the_learners_time():
    found = decide(since_s=910.5)
    assert found is not None
    assert (found.since_s, found.until_s) == (910.5, None)


def test_a_learner_with_work_under_way_is_waited_for():
    found = decide(signals=signals(phase=RunPhase.DRAINING, in_flight=1))
    assert found is not None
    assert found.until_s is not None


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(None, id="it never answered"),
        pytest.param(dataclasses.replace(signals().at_age(2.0), is_silent=True), id="it is gone"),
        pytest.param(signals().at_age(61.0), id="its signals are older than a minute"),
        pytest.param(signals(phase=RunPhase.DRAINING, in_flight=0), id="nothing is under way"),
        pytest.param(signals(phase=RunPhase.FAILED), id="it has failed"),
    ],
)
def test_nobody_waits_for_nothing(said):
    assert decide(signals=said) == LearnerDrain(
        reason="the run is suspended", since_s=None, until_s=None
    )


@pytest.mark.parametrize("phase", [LifecyclePhase.RUN, LifecyclePhase.COMPLETE])
def test_a_run_that_goes_on_or_is_complete_needs_no_end(phase):
    assert decide(phase) is None


@pytest.mark.parametrize("observed", [ObservedState(), at_work(workers=0), at_work(learners=0)])
def test_a_run_at_rest_needs_no_end(observed):
    assert decide(observed=observed) is None


def test_a_failed_run_says_why_it_ends():
    found = decide(LifecyclePhase.FAILED)
    assert found is not None
    assert found.reason == "the run has failed: why"
