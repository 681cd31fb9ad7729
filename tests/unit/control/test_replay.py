"""The decisions on a recorded run are the recorded decisions."""

from __future__ import annotations

import json

import pytest

from tests.unit.control.record_trace import BOUNDS, TRACE
from vcpo.control.decision import decide
from vcpo.control.signals import RunSignals
from vcpo.control.state import ControlState


@pytest.fixture(scope="module")
def trace():
    return json.loads(TRACE.read_text(encoding="utf-8"))


def test_a_replayed_trace_gives_identical_decisions(trace):
    state = ControlState.start(BOUNDS, now_s=0.0)
    for entry in trace:
        seen = None if entry["signals"] is None else RunSignals(**entry["signals"])
        state = ControlState.from_dict(json.loads(json.dumps(state.to_dict())))
        decision, state = decide(BOUNDS, state, seen, entry["now_s"])
        assert decision.replicas == entry["replicas"]
        assert decision.lag_limit_steps == entry["lag_limit_steps"]
        said = [f"{each.type}={each.status}/{each.reason}" for each in decision.conditions]
        assert said == entry["conditions"]


def test_the_trace_visits_growth_illness_recovery_silence_and_shrinking(trace):
    sizes = [sum(entry["replicas"].values()) for entry in trace]
    lags = [entry["lag_limit_steps"] for entry in trace]
    assert sizes[0] == 1 < sizes[29]
    assert (lags[29], lags[30], min(lags), lags[79]) == (8, 4, 2, 8)
    assert all(entry["replicas"] == trace[59]["replicas"] for entry in trace[60:70])
    assert sizes[-1] < sizes[79]
