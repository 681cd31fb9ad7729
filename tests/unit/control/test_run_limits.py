"""The limits of a run: one judge, and the same verdict on a laptop and in a cluster."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.api import parse_run
from vcpo.control.run_limits import (
    LimitReason,
    RunLimits,
    RunTimes,
    exceeded_deadline,
    exceeded_restarts,
    next_deadline_s,
)
from vcpo.local.host import Host, HostOptions
from vcpo.local.processes.fleet import RunFailedError
from vcpo.local.processes.learner import LearnerProcess
from vcpo.local.run_dir import RunDir
from vcpo.metrics import HostMetrics
from vcpo_operator.decisions.lifecycle import LifecyclePhase, judge
from vcpo_operator.observed.status import LearnerStatus, RunStatus

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
LIMITS = RunLimits.of(RUN.spec)

seconds = st.integers(min_value=1, max_value=10_000)
limits = st.builds(
    RunLimits,
    pending_s=st.none() | seconds,
    startup_s=seconds,
    active_s=st.none() | seconds,
    max_learner_restarts=st.integers(min_value=0, max_value=10),
)
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
    found = exceeded_deadline(LIMITS, waiting, START_S + waited_s)
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
    found = exceeded_deadline(LIMITS, admitted_times(has_stepped=has_stepped), now_s)
    assert (found and found.reason) == reason


@pytest.mark.parametrize(("failures", "is_exceeded"), [(0, False), (2, False), (3, True)])
def test_restarts_are_limited_in_a_row(failures: int, is_exceeded: bool):
    assert (exceeded_restarts(LIMITS, failures) is not None) is is_exceeded


@given(limits, times, st.integers(min_value=1_000, max_value=20_000))
def test_a_deadline_is_exceeded_from_the_next_deadline_on(limits, times, now_s):
    deadline_s = next_deadline_s(limits, times)
    is_exceeded = exceeded_deadline(limits, times, now_s) is not None
    assert is_exceeded is (deadline_s is not None and now_s >= deadline_s)


# The hosts: each is given the same facts and must say the same.


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


def verdict_of_operator(elapsed_s: float, *, has_stepped: bool, failures: int) -> str:
    """The message of the operator's verdict; empty while the run goes on."""
    status = RunStatus(
        start_s=START_S,
        admission_s=START_S,
        first_step_s=START_S if has_stepped else None,
        learner=LearnerStatus(failures=failures),
    )
    verdict = judge(RUN.spec, status, None, START_S + elapsed_s)
    return verdict.message if verdict.phase is LifecyclePhase.FAILED else ""


def verdict_of_local_deadlines(tmp_path, elapsed_s: float, *, has_stepped: bool) -> str:
    directory, clock = RunDir(tmp_path / "r"), Clock()
    if not directory.path.exists():
        directory.create(RUN)
    options = HostOptions(resume=False, metrics=HostMetrics(), metrics_port=1, clock=clock)
    host = Host(RUN, directory, SimpleNamespace(), options)
    host._furthest_step = int(has_stepped)
    clock.now_s += elapsed_s
    try:
        host._check_deadlines()
    except RunFailedError as error:
        return str(error)
    return ""


def verdict_of_local_restarts(failures: int) -> str:
    child = SimpleNamespace(
        exit_code=1,
        hung_s=0.0,
        describe_failure=lambda: "ended with status 1",
        kill=lambda: None,
        ready=None,
    )
    fleet = SimpleNamespace(learner_ranks=[child], start_learner=lambda **_: None)
    clock = Clock()
    learner = LearnerProcess(fleet, resume=False, limits=LIMITS, clock=clock)
    try:
        for _ in range(failures):
            clock.now_s += 60.0
            learner.start_when_due(0)
            learner.take_end(step=0)
    except RunFailedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("elapsed_s", [0.0, 59.9, 60.0, 60.1, 599.9, 600.0, 600.1])
def test_both_hosts_meet_the_same_deadlines(tmp_path, elapsed_s: float, has_stepped: bool):
    in_cluster = verdict_of_operator(elapsed_s, has_stepped=has_stepped, failures=0)
    on_laptop = verdict_of_local_deadlines(tmp_path, elapsed_s, has_stepped=has_stepped)
    assert bool(on_laptop) is bool(in_cluster)
    assert on_laptop.startswith(in_cluster)


@pytest.mark.parametrize("failures", range(5))
def test_both_hosts_allow_the_same_restarts(failures: int):
    in_cluster = verdict_of_operator(0.0, has_stepped=False, failures=failures)
    on_laptop = verdict_of_local_restarts(failures)
    assert bool(on_laptop) is bool(in_cluster)
    # The local host gives up at the first failure beyond the limit, the count of a pod may jump.
    assert on_laptop.startswith(re.sub("ended 4 times", "ended 3 times", in_cluster))
