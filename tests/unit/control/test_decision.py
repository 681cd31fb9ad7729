"""A decision holds on bad signals, says why, and can be repeated."""

import dataclasses

import pytest

from tests.unit.control.plant import saturated_signals, signals, spec_of, starving_signals
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.conditions import ConditionStatus, ConditionType, Reason, condition
from vcpo.control.decision import ControlState, decide
from vcpo.control.limits import ChangeKind
from vcpo.control.scaling import Direction, FleetState, Starvation
from vcpo.control.throttle import ThrottleState

DEFAULTS = spec_of()
STATE = ControlState(
    throttle=ThrottleState(lag_limit_steps=4, progress=20, judged_step=9),
    fleet=FleetState(replicas={"main": 2}, scaled_s=0.0),
)
NOW_S = 1000.0


def reasons_of(seen, state=STATE):
    return [each.reason for each in decide(DEFAULTS, state, seen, NOW_S)[0].conditions]


def test_without_signals_a_run_starts_at_the_minimum_and_the_full_lag():
    bounds = spec_of(("main", 2, 8), ("spot", 0, 4))
    state = ControlState.start(bounds, now_s=0.0)
    decision, _ = decide(bounds, state, None, 0.0)
    assert decision.replicas == {"main": 2, "spot": 0}
    assert decision.lag_limit_steps == 8


def test_a_run_with_minimum_zero_starts_with_one_worker():
    bounds = spec_of(("main", 0, 8), ("spot", 0, 4))
    assert ControlState.start(bounds, now_s=0.0).fleet.replicas == {"main": 1, "spot": 0}


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        pytest.param(None, Reason.MISSING, id="missing"),
        pytest.param(starving_signals(age_s=60.1), Reason.STALE, id="stale"),
    ],
)
def test_bad_signals_hold_everything_and_say_so(seen, reason):
    decision, state = decide(DEFAULTS, STATE, seen, NOW_S)
    assert (decision.replicas, decision.lag_limit_steps) == ({"main": 2}, 4)
    assert (decision.direction, decision.changes, state) == (Direction.HOLD, (), STATE)
    assert [each.reason for each in decision.conditions] == [reason, *[Reason.NO_SIGNALS] * 3]


def test_signals_at_the_age_limit_are_still_acted_on():
    assert decide(DEFAULTS, STATE, starving_signals(age_s=60.0), NOW_S)[0].direction is Direction.UP


def test_a_starving_run_grows_and_says_why():
    seen = starving_signals(step=9, consumed_per_s=3.0)
    decision, _ = decide(DEFAULTS, STATE, seen, NOW_S)
    assert decision.replicas == {"main": 4}
    assert decision.condition(ConditionType.LEARNER_FED).reason is Reason.SCALING_UP
    change = "Rollout group 'main' 2 -> 4 workers"
    assert [each.sentence for each in decision.changes] == [
        f"{change}: the learner waited 50.0% of the time at 3 trajectories/s."
    ]


def test_a_sick_run_tightens_and_says_why():
    decision, _ = decide(DEFAULTS, STATE, signals(ess_ratio_mean=0.04), NOW_S)
    assert decision.lag_limit_steps == 2
    (change,) = decision.changes
    sentence = "Lag limit 4 -> 2 versions: the ESS ratio is 5.0% of the on-policy ratio."
    assert change.sentence == sentence
    assert (change.kind, change.before, change.after) == (ChangeKind.THROTTLED, 4, 2)


def test_why_the_limit_is_what_it_is_is_known_until_it_changes_again():
    decision, state = decide(DEFAULTS, STATE, signals(ess_ratio_mean=0.04), NOW_S)
    assert decision.lag_reason == "the ESS ratio is 5.0% of the on-policy ratio"
    for seen in (signals(step=11, ess_ratio_mean=0.1), None):
        later, state = decide(DEFAULTS, state, seen, NOW_S + 5.0)
        assert (later.changes, later.last_lag_change) == ((), decision.changes[0])


def test_a_tightened_lag_counts_at_once_for_what_workers_could_still_get():
    # 4 -> 2 admits 3 batches of 16; 44 out are 0.92 of them but 0.55 of the former 5 batches.
    seen = starving_signals(ess_ratio_mean=0.04, in_flight=44)
    assert reasons_of(seen)[2] is Reason.ADMISSION_BOUND


@pytest.mark.parametrize(
    ("ess_ratio", "lag", "reason"),
    [
        pytest.param(0.6, 8, Reason.ABOVE_FLOOR, id="healthy"),
        pytest.param(0.6, 4, Reason.RECOVERING, id="healthy and tightened"),
        pytest.param(0.04, 8, Reason.BELOW_FLOOR, id="below the floor"),
        pytest.param(None, 8, Reason.NO_STEP_YET, id="not measured"),
    ],
)
def test_ess_condition_says(ess_ratio, lag, reason):
    state = dataclasses.replace(STATE, throttle=ThrottleState(lag_limit_steps=lag))
    assert reasons_of(signals(ess_ratio_mean=ess_ratio), state)[1] is reason


@pytest.mark.parametrize(
    ("kind", "reason", "status"),
    [
        (ConditionType.SIGNALS_FRESH, Reason.FRESH, ConditionStatus.TRUE),
        (ConditionType.SIGNALS_FRESH, Reason.STALE, ConditionStatus.FALSE),
        (ConditionType.SIGNALS_FRESH, Reason.MISSING, ConditionStatus.FALSE),
        (ConditionType.ESS_HEALTHY, Reason.RECOVERING, ConditionStatus.TRUE),
        (ConditionType.ESS_HEALTHY, Reason.BELOW_FLOOR, ConditionStatus.FALSE),
        (ConditionType.ESS_HEALTHY, Reason.NO_SIGNALS, ConditionStatus.UNKNOWN),
        (ConditionType.LEARNER_FED, Reason.SATURATED, ConditionStatus.TRUE),
        (ConditionType.LEARNER_FED, Reason.SCALING_UP, ConditionStatus.FALSE),
        (ConditionType.LEARNER_FED, Reason.AT_MAXIMUM, ConditionStatus.FALSE),
        (ConditionType.LEARNER_FED, Reason.NO_STEP_YET, ConditionStatus.UNKNOWN),
        (ConditionType.STABLE, Reason.OK, ConditionStatus.TRUE),
        (ConditionType.STABLE, Reason.WARN, ConditionStatus.TRUE),
        (ConditionType.STABLE, Reason.CRITICAL, ConditionStatus.FALSE),
        (ConditionType.STABLE, Reason.DEAD, ConditionStatus.FALSE),
        (ConditionType.STABLE, Reason.NO_SIGNALS, ConditionStatus.UNKNOWN),
    ],
)
def test_true_is_the_good_state_of_every_condition(kind, reason, status):
    assert condition(kind, reason).status is status


def test_new_bounds_of_a_spec_apply_without_signals():
    bounds = spec_of(("main", 3, 8), ("spot", 1, 2), max_policy_lag_steps=1)
    decision, _ = decide(bounds, STATE, None, NOW_S)
    assert (decision.replicas, decision.lag_limit_steps) == ({"main": 3, "spot": 1}, 1)


def test_a_clock_set_back_restarts_the_cooldowns():
    state = dataclasses.replace(STATE, fleet=FleetState(replicas={"main": 2}, scaled_s=9_000.0))
    _, state = decide(DEFAULTS, state, starving_signals(), 100.0)
    assert decide(DEFAULTS, state, starving_signals(), 130.0)[0].direction is Direction.UP


def test_a_clock_set_back_does_not_lengthen_the_memory_of_starvation():
    starvation = Starvation(workers=1, seen_s=9_000.0)
    fleet = FleetState(replicas={"main": 2}, scaled_s=0.0, starvation=starvation)
    state = dataclasses.replace(STATE, fleet=fleet).fit(DEFAULTS, 100.0)
    assert decide(DEFAULTS, state, saturated_signals(), 3_100.0)[0].direction is Direction.DOWN


@pytest.mark.parametrize("level", [WarningLevel.CRITICAL, WarningLevel.DEAD])
def test_a_critical_warning_throttles_with_its_score_and_step_as_the_reason(level):
    seen = signals(step=12, warning_level=level, warning_score=0.714)
    decision, state = decide(DEFAULTS, STATE, seen, NOW_S)
    (change,) = decision.changes
    assert change.kind is ChangeKind.THROTTLED
    assert change.sentence == (
        f"Lag limit 4 -> 0 versions: early warning {level} (score 0.71) at step 12."
    )
    assert (decision.lag_limit_steps, state.last_lag_change) == (0, change)


def test_a_warning_that_came_and_went_between_two_looks_is_followed():
    seen = signals(step=60, warning_level=WarningLevel.OK, lag_limit_steps=0)
    decision, _ = decide(DEFAULTS, STATE, seen, NOW_S)
    assert decision.lag_limit_steps == 0
    assert decision.changes[0].reason == (
        "the learner already holds this limit, after an early warning or a restart"
    )


def test_a_spec_that_ignores_critical_warnings_leaves_the_lag_to_the_ess():
    seen = signals(step=12, warning_level=WarningLevel.DEAD, warning_score=1.0)
    bounds = spec_of(guarded=False)
    assert decide(bounds, STATE, seen, NOW_S)[0].lag_limit_steps >= 4


def test_a_fall_by_the_ess_is_not_put_down_to_a_warning_that_the_spec_ignores():
    seen = signals(
        step=12,
        warning_level=WarningLevel.CRITICAL,
        warning_score=0.7,
        ess_ratio_mean=0.04,
        on_policy_ess_ratio=0.8,
    )
    bounds = spec_of(guarded=False)
    (change,) = decide(bounds, STATE, seen, NOW_S)[0].changes
    assert change.sentence == (
        "Lag limit 4 -> 2 versions: the ESS ratio is 5.0% of the on-policy ratio."
    )
