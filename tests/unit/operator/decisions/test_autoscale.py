"""The control loop in a cluster: live replicas are the state, and a restart loses little."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.fixtures.operator.runs import make_run, signals
from vcpo.control.limits import ControlLimits, lag_change
from vcpo.control.state import ControlState
from vcpo_operator.children import Kind
from vcpo_operator.decisions.autoscale import AutoscaleDecision, decide_autoscale, stored_state
from vcpo_operator.observed.records import ObservedChild, ObservedGroup, ObservedState

NOW_S = 1_000_000.0


def make_observed(**replicas: int) -> ObservedState:
    groups = {}
    for name, wanted in replicas.items():
        child = ObservedChild(
            kind=Kind.DEPLOYMENT, name=name, uid=name, owner_uid="u", digest="d", version=1
        )
        groups[name] = ObservedGroup(child=child, group=name, replicas=wanted, ready=wanted)
    return ObservedState(groups=groups)


def decide(
    there: ObservedState, stored: Any = None, says: Any = None, **group: Any
) -> AutoscaleDecision:
    spec = make_run(rollouts=[{"name": "main", "minReplicas": 2, "maxReplicas": 6, **group}]).spec
    return decide_autoscale(
        spec, known=None, stored=stored or {}, observed=there, signals=says, now_s=NOW_S
    )


def test_a_new_run_wants_its_least_number_of_workers():
    assert decide(ObservedState()).decision.replicas == {"main": 2}


def test_a_manual_scale_changes_the_desired_replicas():
    assert decide(make_observed(main=5)).decision.replicas == {"main": 5}


def test_a_manual_scale_restarts_the_cooldown():
    known = ControlState.start(ControlLimits.of(make_run().spec), now_s=1.0)
    autoscale = decide(make_observed(main=5), stored=stored_state(known))
    assert autoscale.state.fleet.scaled_s == NOW_S


def test_a_scale_beyond_the_bounds_is_brought_back_to_them():
    assert decide(make_observed(main=9)).decision.replicas == {"main": 6}


def test_a_state_reads_back_as_it_was_stored():
    spec = make_run(rollouts=[{"name": "main", "minReplicas": 2, "maxReplicas": 6}]).spec
    known = ControlState.start(ControlLimits.of(spec), now_s=5.0, replicas={"main": 3})
    assert decide(make_observed(main=3), stored=stored_state(known)).state == known
    change = lag_change(before=8, after=4, reason="a low ESS", decided_s=4.0)
    known = dataclasses.replace(known, last_lag_change=change)
    assert decide(make_observed(main=3), stored=stored_state(known)).state == known


def test_what_is_unknown_is_not_stored():
    known = ControlState.start(ControlLimits.of(make_run().spec), now_s=5.0)
    assert set(stored_state(known)["fleet"]) == {"replicas", "scaled_s"}


def test_without_a_stored_state_the_learner_s_limit_stays_in_force():
    autoscale = decide(ObservedState(), says=signals(lag_limit_steps=3, ess_ratio_mean=None))
    assert autoscale.decision.lag_limit_steps == 3
