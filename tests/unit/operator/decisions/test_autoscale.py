"""The control loop in a cluster: live replicas are the truth, and a restart forgets little."""

from __future__ import annotations

from typing import Any

from tests.fixtures.operator.runs import make_run, report
from vcpo.control import ControlState, Limits
from vcpo_operator.children import Kind
from vcpo_operator.decisions.autoscale import Steering, steer, stored_form
from vcpo_operator.observed.records import Observed, ObservedChild, ObservedGroup

NOW_S = 1_000_000.0


def observed(paused: bool = False, **replicas: int) -> Observed:
    groups = {}
    for name, wanted in replicas.items():
        child = ObservedChild(
            kind=Kind.DEPLOYMENT, name=name, uid=name, owner_uid="u", digest="d", version=1
        )
        groups[name] = ObservedGroup(
            child=child, group=name, replicas=wanted, current=wanted, ready=wanted, paused=paused
        )
    return Observed(groups=groups)


def steered(there: Observed, stored: Any = None, says: Any = None, **group: Any) -> Steering:
    spec = make_run(rollouts=[{"name": "main", "minReplicas": 2, "maxReplicas": 6, **group}]).spec
    return steer(spec, known=None, stored=stored or {}, observed=there, report=says, now_s=NOW_S)


def test_a_new_run_wants_its_least_number_of_workers():
    assert steered(Observed()).decision.replicas == {"main": 2}


def test_a_paused_deployment_does_not_say_how_many_are_wanted():
    assert steered(observed(paused=True, main=1)).decision.replicas == {"main": 2}


def test_a_hand_on_the_scale_moves_the_wish():
    assert steered(observed(main=5)).decision.replicas == {"main": 5}


def test_a_hand_on_the_scale_starts_the_cool_down_anew():
    known = ControlState.start(Limits.of(make_run().spec), now_s=1.0)
    steering = steered(observed(main=5), stored=stored_form(known))
    assert steering.state.fleet.scaled_s == NOW_S


def test_a_scale_beyond_the_bounds_is_brought_back_to_them():
    assert steered(observed(main=9)).decision.replicas == {"main": 6}


def test_a_group_that_somebody_else_scales_may_have_any_number():
    assert steered(observed(main=9), scaling="External").decision.replicas == {"main": 9}


def test_a_state_reads_back_as_it_was_stored():
    spec = make_run(rollouts=[{"name": "main", "minReplicas": 2, "maxReplicas": 6}]).spec
    known = ControlState.start(Limits.of(spec), now_s=5.0, replicas={"main": 3})
    assert steered(observed(main=3), stored=stored_form(known)).state == known


def test_what_is_unknown_is_not_stored():
    known = ControlState.start(Limits.of(make_run().spec), now_s=5.0)
    assert set(stored_form(known)["fleet"]) == {"replicas", "scaled_s"}


def test_without_a_stored_state_the_learner_s_limit_stays_in_force():
    steering = steered(Observed(), says=report(admission_lag_steps=3, ess_ratio_mean=None))
    assert steering.decision.admission_lag_steps == 3
