"""Signals, deadlines, restarts and admission, beside the decisions that follow from them."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.control.plant import signals
from vcpo.api import parse_run
from vcpo.control.run_limits import (
    FailureStreak,
    LimitReason,
    RunTimes,
    exceeded_deadline,
    exceeded_restarts,
    next_deadline_s,
)
from vcpo_learner.ledger.admission import admissible_trajectories, surplus_trajectories


def test_relative_ess_is_a_share_of_the_on_policy_ratio():
    seen = signals(ess_ratio_mean=0.2, ess_ratio_low=0.1, on_policy_ess_ratio=0.8)
    assert (seen.relative_ess_ratio_mean, seen.relative_ess_ratio_low) == (0.25, 0.125)


def test_relative_ess_is_one_where_the_batch_beats_the_calibration():
    assert signals(ess_ratio_mean=0.9, on_policy_ess_ratio=0.6).relative_ess_ratio_mean == 1.0


def test_a_step_whose_weights_have_no_value_has_no_ess():
    assert signals(ess_ratio=0.0).relative_ess_ratio is None


def streak_of(*progress: int) -> FailureStreak:
    streak = FailureStreak()
    for reached in progress:
        streak = streak.after_failure(reached)
    return streak


def test_the_pause_doubles_up_to_a_minute():
    pauses_s = [streak_of(*[0] * n).pause_s for n in range(11)]
    assert pauses_s == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


@given(st.lists(st.integers(min_value=0, max_value=20), max_size=50))
def test_a_streak_is_as_long_as_the_list_since_the_last_record(progress: list[int]):
    records = [at for at, reached in enumerate(progress) if reached > max(progress[:at], default=0)]
    expected = len(progress) - records[-1] if records else len(progress)
    assert streak_of(*progress).failures == expected


START_S = 1_000.0
RUN = parse_run("""
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 300
  activeDeadlineSeconds: 600
  startupDeadlineSeconds: 60
  pendingDeadlineSeconds: 30
  failurePolicy: {maxLearnerRestarts: 2}
""")

seconds = st.integers(min_value=1, max_value=10_000)
specs = st.fixed_dictionaries(
    {
        "pending_deadline_seconds": st.none() | seconds,
        "startup_deadline_seconds": seconds,
        "active_deadline_seconds": st.none() | seconds,
    }
).map(lambda given: RUN.spec.model_copy(update=given))
times = st.builds(
    RunTimes,
    start_s=st.just(START_S),
    admission_s=st.none() | st.integers(min_value=1_000, max_value=5_000).map(float),
    has_stepped=st.booleans(),
)


def admitted_times(*, has_stepped: bool = False) -> RunTimes:
    return RunTimes(start_s=START_S, admission_s=START_S + 100, has_stepped=has_stepped)


@pytest.mark.parametrize(
    ("waited_s", "reason"), [(29.0, None), (30.0, LimitReason.PENDING_DEADLINE_EXCEEDED)]
)
def test_before_the_admission_only_the_pending_deadline_acts(waited_s, reason):
    waiting = RunTimes(start_s=START_S, admission_s=None, has_stepped=False)
    found = exceeded_deadline(RUN.spec, waiting, START_S + waited_s)
    assert (found and found.reason) == reason


@pytest.mark.parametrize(
    ("elapsed_s", "has_stepped", "reason"),
    [
        (59.0, False, None),
        (60.0, False, LimitReason.STARTUP_DEADLINE_EXCEEDED),
        (599.0, True, None),
        (600.0, True, LimitReason.DEADLINE_EXCEEDED),
        (600.0, False, LimitReason.DEADLINE_EXCEEDED),
    ],
)
def test_after_the_admission_the_deadlines_count_from_it(elapsed_s, has_stepped, reason):
    now_s = START_S + 100 + elapsed_s
    found = exceeded_deadline(RUN.spec, admitted_times(has_stepped=has_stepped), now_s)
    assert (found and found.reason) == reason


@pytest.mark.parametrize(("failures", "is_exceeded"), [(0, False), (2, False), (3, True)])
def test_restarts_are_limited_in_a_row(failures: int, is_exceeded: bool):
    assert (exceeded_restarts(RUN.spec, failures) is not None) is is_exceeded


@given(specs, times, st.integers(min_value=1_000, max_value=20_000))
def test_a_deadline_is_exceeded_from_the_next_deadline_on(spec, times, now_s):
    deadline_s = next_deadline_s(spec, times)
    is_exceeded = exceeded_deadline(spec, times, now_s) is not None
    assert is_exceeded is (deadline_s is not None and now_s >= deadline_s)


BATCH = 4
MAX_LAG = 3


def admit(**changes: int) -> int:
    chosen = {
        "lag_limit_steps": 2,
        "held_step": 5,
        "batch_trajectories": 10,
        "accepted": 60,
        "in_flight": 7,
    }
    return admissible_trajectories(**{**chosen, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, 13, id="(2 + 1 + 5) * 10 - 67"),
        pytest.param({"lag_limit_steps": 0}, 0, id="(0 + 1 + 5) * 10 - 67 is below zero"),
        pytest.param({"held_step": 6}, 23, id="a newer version admits a batch more"),
        pytest.param({"accepted": 0, "in_flight": 0, "held_step": 0}, 30, id="start"),
        pytest.param({"accepted": 73}, 0, id="exactly at the bound"),
        pytest.param({"accepted": 72}, 1, id="one below the bound"),
        pytest.param({"over_provision_ratio": 1.5}, 18, id="20 + 0.5 * 10 - 7"),
        pytest.param({"over_provision_ratio": 1.25, "accepted": 73}, 1, id="7 + floor(1.75) - 7"),
        pytest.param({"over_provision_ratio": 8.0, "accepted": 80}, 0, id="nothing left to use"),
        pytest.param({"over_provision_ratio": 8.0, "accepted": 90}, 0, id="beyond the bound"),
    ],
)
def test_admissible_work_is_the_bound_less_what_is_out(changes, expected):
    assert admit(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, 2, id="8 in flight - (4 + 0.5 * 4)"),
        pytest.param({"max_policy_lag_steps": 0}, 8, id="at lag 0 a batch is all that can be used"),
        pytest.param({"step": 1}, 0, id="after the step there is room again"),
        pytest.param({"accepted": 5, "in_flight": 7}, 3, id="7 in flight - (3 + floor(1.5))"),
        pytest.param({"over_provision_ratio": 2.0}, 0, id="exactly at the limit"),
    ],
)
def test_what_is_in_flight_beyond_the_limit_is_surplus(changes, expected):
    chosen = {
        "max_policy_lag_steps": 1,
        "step": 0,
        "batch_trajectories": 4,
        "accepted": 4,
        "in_flight": 8,
        "over_provision_ratio": 1.5,
    }
    assert surplus_trajectories(**{**chosen, **changes}) == expected


@dataclass
class _Grant:
    sampled_version: int
    done: bool = False


@dataclass
class _System:
    """Three workers and a learner that consumes whole batches in the order of the grants."""

    use_learner_version: bool = False
    version: int = 0
    consumed: int = 0
    held: list[int] = field(default_factory=lambda: [0, 0, 0])
    queue: deque[_Grant] = field(default_factory=deque)
    lags: list[int] = field(default_factory=list)

    def lease(self, worker: int, lag_limit_steps: int) -> None:
        done = sum(grant.done for grant in self.queue)
        count = admissible_trajectories(
            lag_limit_steps=lag_limit_steps,
            held_step=self.version if self.use_learner_version else self.held[worker],
            batch_trajectories=BATCH,
            accepted=self.consumed + done,
            in_flight=len(self.queue) - done,
        )
        self.queue.extend(_Grant(self.held[worker]) for _ in range(count))

    def fetch(self, worker: int) -> None:
        self.held[worker] = self.version

    def finish(self, position: int) -> None:
        if position < len(self.queue):
            self.queue[position].done = True

    def drop(self, position: int) -> None:
        if position < len(self.queue):
            del self.queue[position]

    def learn(self) -> None:
        head = [self.queue[i] for i in range(min(BATCH, len(self.queue)))]
        if len(head) < BATCH or not all(grant.done for grant in head):
            return
        for _ in range(BATCH):
            self.lags.append(self.version - self.queue.popleft().sampled_version)
        self.consumed += BATCH
        self.version += 1

    def finish_all_and_learn(self) -> None:
        for grant in self.queue:
            grant.done = True
        while len(self.queue) >= BATCH:
            self.learn()


WORKER = st.integers(0, 2)
POSITION = st.integers(0, (MAX_LAG + 1) * BATCH)
EVENTS = st.one_of(
    st.tuples(st.just("lease"), WORKER, st.integers(0, MAX_LAG)),
    st.tuples(st.just("fetch"), WORKER),
    st.tuples(st.just("finish"), POSITION),
    st.tuples(st.just("drop"), POSITION),
    st.tuples(st.just("learn")),
    st.tuples(st.just("finish_all_and_learn")),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_no_schedule_of_workers_gets_data_older_than_the_bound_into_an_update(events):
    system = _System()
    for name, *arguments in events:
        getattr(system, name)(*arguments)
    assert all(0 <= lag <= MAX_LAG for lag in system.lags)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_bound_is_reached_so_a_larger_one_would_not_hold(lag):
    system = _System()
    system.lease(0, lag)
    system.finish_all_and_learn()
    assert max(system.lags) == lag


def test_with_the_learners_version_a_worker_behind_it_breaks_the_bound():
    system = _System(use_learner_version=True)
    for _ in range(2):
        system.lease(0, 1)
        system.finish_all_and_learn()
    assert max(system.lags) == 3
