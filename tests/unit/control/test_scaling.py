"""Workers are added while the learner waits for data, and removed when they are too many."""

import pytest

from tests.unit.control.plant import BATCH, saturated_signals, signals, spec_of, starving_signals
from vcpo.api import VCPORunSpec
from vcpo.control.conditions import Reason
from vcpo.control.scaling import FleetState, ScalingContext, Starvation, next_fleet
from vcpo.control.signals import RunSignals

DEFAULTS = spec_of()
LATER_S = 1000.0


def fleet(workers: int = 2, **changes: object) -> FleetState:
    return FleetState(**{"replicas": {"main": workers}, "scaled_s": 0.0, **changes})


def decide(
    seen: RunSignals,
    before: FleetState | None = None,
    bounds: VCPORunSpec = DEFAULTS,
    **context: object,
) -> tuple[dict[str, int], Reason]:
    chosen = {"lag_limit_steps": 8, "ess_has_room": True, "now_s": LATER_S, **context}
    after, reason = next_fleet(bounds, before or fleet(), seen, ScalingContext(**chosen))
    return dict(after.replicas), reason


@pytest.mark.parametrize(
    ("seen", "context", "workers", "reason"),
    [
        pytest.param(starving_signals(), {}, 4, Reason.SCALING_UP, id="2 / (1 - 0.5)"),
        pytest.param(
            starving_signals(learner_idle_ratio=0.31),
            {},
            3,
            Reason.SCALING_UP,
            id="2 / 0.69, rounded up",
        ),
        pytest.param(
            starving_signals(learner_idle_ratio=1.0),
            {},
            4,
            Reason.SCALING_UP,
            id="at most a doubling",
        ),
        pytest.param(
            starving_signals(learner_idle_ratio=0.3), {}, 2, Reason.BALANCED, id="at the limit"
        ),
        pytest.param(
            starving_signals(in_flight=9 * BATCH),
            {},
            2,
            Reason.ADMISSION_BOUND,
            id="all work handed out",
        ),
        pytest.param(
            starving_signals(in_flight=2 * BATCH),
            {"lag_limit_steps": 1},
            2,
            Reason.ADMISSION_BOUND,
            id="all work that a tightened lag admits",
        ),
        pytest.param(
            starving_signals(), {"ess_has_room": False}, 2, Reason.ESS_LOW, id="ESS is low"
        ),
        pytest.param(starving_signals(lag_p50=6), {}, 4, Reason.SCALING_UP, id="lag at 3/4 of 8"),
        pytest.param(starving_signals(lag_p50=7), {}, 2, Reason.LAG_HIGH, id="lag above 3/4 of 8"),
        pytest.param(
            starving_signals(lag_max=5),
            {"lag_limit_steps": 4},
            2,
            Reason.LAG_HIGH,
            id="oldest token",
        ),
        pytest.param(
            starving_signals(ready_workers={"main": 1}),
            {},
            2,
            Reason.WORKERS_PENDING,
            id="one on its way",
        ),
        pytest.param(
            starving_signals(ready_workers={}),
            {},
            2,
            Reason.WORKERS_PENDING,
            id="both on their way",
        ),
        pytest.param(
            starving_signals(learner_idle_ratio=0.31, ready_workers={"main": 6}),
            {},
            3,
            Reason.SCALING_UP,
            id="four more are leaving",
        ),
        pytest.param(starving_signals(), {"now_s": 29.0}, 2, Reason.COOLING_DOWN, id="cool-down"),
        pytest.param(
            starving_signals(), {"now_s": 30.0}, 4, Reason.SCALING_UP, id="cool-down over"
        ),
        pytest.param(
            starving_signals(ess_ratio_mean=None, lag_p50=None),
            {},
            2,
            Reason.NO_STEP_YET,
            id="no step",
        ),
        pytest.param(saturated_signals(), {}, 1, Reason.SCALING_DOWN, id="saturated"),
        pytest.param(
            saturated_signals(), {"now_s": 299.0}, 2, Reason.SATURATED, id="cool-down of removals"
        ),
        pytest.param(
            saturated_signals(learner_idle_ratio=0.02),
            {},
            2,
            Reason.BALANCED,
            id="waits just enough",
        ),
        pytest.param(
            saturated_signals(buffered=6 * BATCH),
            {},
            2,
            Reason.BALANCED,
            id="work left to hand out",
        ),
        pytest.param(signals(), {}, 2, Reason.BALANCED, id="balanced"),
    ],
)
def test_two_workers_become(seen, context, workers, reason):
    assert decide(seen, **context) == ({"main": workers}, reason)


@pytest.mark.parametrize(("before", "after"), [(8, 6), (7, 6), (4, 3), (3, 2), (2, 1)])
def test_a_quarter_goes_at_a_time_and_at_least_one(before, after):
    seen = saturated_signals(ready_workers={"main": before})
    assert decide(seen, fleet(before)) == ({"main": after}, Reason.SCALING_DOWN)


def test_a_full_group_stays_at_its_maximum():
    seen = starving_signals(ready_workers={"main": 8})
    assert decide(seen, fleet(8)) == ({"main": 8}, Reason.AT_MAXIMUM)


def test_the_last_worker_of_a_run_stays_even_with_a_minimum_of_zero():
    seen = saturated_signals(ready_workers={"main": 1})
    bounds = spec_of(("main", 0, 8))
    assert decide(seen, fleet(1), bounds) == ({"main": 1}, Reason.AT_MINIMUM)


def test_a_second_change_waits_for_a_new_step():
    before = fleet(scaled_step=10)
    assert decide(starving_signals(step=10), before) == ({"main": 2}, Reason.COOLING_DOWN)
    assert decide(starving_signals(step=11), before) == ({"main": 4}, Reason.SCALING_UP)


@pytest.mark.parametrize(
    ("spot", "steady", "after"),
    [
        pytest.param(2, 0, {"spot": 4, "steady": 0}, id="the first group doubles"),
        pytest.param(3, 0, {"spot": 4, "steady": 0}, id="the first group fills up"),
        pytest.param(4, 0, {"spot": 4, "steady": 1}, id="the second group begins with one"),
        pytest.param(4, 2, {"spot": 4, "steady": 4}, id="then the second group doubles"),
    ],
)
def test_groups_are_filled_in_order_one_at_a_time(spot, steady, after):
    replicas = {"spot": spot, "steady": steady}
    bounds = spec_of(("spot", 0, 4), ("steady", 0, 8))
    seen = starving_signals(ready_workers=replicas)
    assert decide(seen, fleet(replicas=replicas), bounds) == (after, Reason.SCALING_UP)


@pytest.mark.parametrize(
    ("spot", "steady", "after"),
    [
        pytest.param(4, 4, {"spot": 4, "steady": 3}, id="the last group shrinks first"),
        pytest.param(4, 1, {"spot": 3, "steady": 1}, id="down to its minimum"),
    ],
)
def test_groups_are_emptied_in_the_reverse_order(spot, steady, after):
    replicas = {"spot": spot, "steady": steady}
    bounds = spec_of(("spot", 0, 4), ("steady", 1, 8))
    seen = saturated_signals(ready_workers=replicas)
    assert decide(seen, fleet(replicas=replicas), bounds) == (after, Reason.SCALING_DOWN)


@pytest.mark.parametrize(
    ("seen_s", "workers", "reason"),
    [
        pytest.param(LATER_S - 2999.0, 4, Reason.AT_MINIMUM, id="remembered"),
        pytest.param(LATER_S - 3000.0, 3, Reason.SCALING_DOWN, id="forgotten"),
    ],
)
def test_a_removal_does_not_go_back_to_workers_that_starved_lately(seen_s, workers, reason):
    before = fleet(4, starvation=Starvation(workers=3, seen_s=seen_s))
    seen = saturated_signals(ready_workers={"main": 4})
    assert decide(seen, before) == ({"main": workers}, reason)


def next_starvation(
    seen: RunSignals, before: FleetState, now_s: float = LATER_S
) -> Starvation | None:
    context = ScalingContext(lag_limit_steps=8, ess_has_room=True, now_s=now_s)
    return next_fleet(DEFAULTS, before, seen, context)[0].starvation


def test_starving_for_workers_is_remembered_with_their_number():
    assert next_starvation(starving_signals(), fleet()) == Starvation(workers=2, seen_s=LATER_S)


def test_starving_just_after_a_change_is_not_held_against_the_new_workers():
    assert next_starvation(starving_signals(), fleet(), now_s=29.0) is None


def test_starving_at_the_admission_bound_is_not_the_workers_fault():
    assert next_starvation(starving_signals(in_flight=9 * BATCH), fleet()) is None


def test_starving_with_more_workers_than_remembered_is_remembered_instead():
    known = Starvation(workers=2, seen_s=LATER_S - 100.0)
    seen = starving_signals(ready_workers={"main": 3})
    after = next_starvation(seen, fleet(3, starvation=known))
    assert after == Starvation(workers=3, seen_s=LATER_S)


def test_losing_workers_does_not_lower_what_is_remembered():
    known = Starvation(workers=2, seen_s=LATER_S - 100.0)
    seen = starving_signals(ready_workers={"main": 1})
    assert next_starvation(seen, fleet(3, starvation=known)) == known
