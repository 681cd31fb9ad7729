"""The screen's view of the learner's signals."""

from __future__ import annotations

from vcpo.api import parse_run
from vcpo.learner_control import run_signals
from vcpo.local.terminal.run_view import RunView, run_view
from vcpo.wire.v1 import control_pb2, work_pb2

RUN = parse_run("""
metadata: {name: r}
spec: {model: {name: m}, environment: {name: countdown}, steps: 300}
""")


def view_of(
    signals: control_pb2.Signals | None, *, serves: bool = True, age_s: float = 4.0
) -> RunView:
    return run_view(
        RUN,
        None if signals is None else run_signals(signals).at_age(age_s),
        learner_serves=serves,
        workers_desired=1,
        elapsed_s=9.0,
    )


def signals(**fields) -> control_pb2.Signals:
    least = {"step": 20, "on_policy_ess_ratio": 0.9, "batch_trajectories": 16}
    return control_pb2.Signals(phase=work_pb2.RUN_PHASE_RUNNING, **least, **fields)


def test_before_the_first_signals_a_run_starts():
    view = view_of(None, serves=False)
    assert (view.phase, view.signals.step, view.signals.warning_level) == ("starting", 0, None)
    assert view.signals.lag_limit_steps == view.max_policy_lag_steps


def test_a_run_whose_learner_is_away_is_not_shown_as_running():
    assert view_of(signals()).phase == "running"
    away = view_of(signals(), serves=False)
    assert (away.phase, away.signals.step, away.signals.age_s) == ("restarting", 20, 4.0)


def test_a_run_whose_learner_does_not_answer_is_not_shown_as_running():
    assert [view_of(signals(), age_s=age_s).phase for age_s in (9.9, 10.0)] == ["running", "silent"]


def test_the_end_is_estimated_from_the_batches_of_late():
    view = view_of(signals(consumed_trajectories_per_second=8.0))
    assert view.eta_s == (300 - 20) * 16 / 8.0
    assert view_of(signals()).eta_s is None


def set_aside(worker_id: str, seconds_since: float) -> control_pb2.SetAsideWorker:
    return control_pb2.SetAsideWorker(
        worker_id=worker_id, cause="failing", message="it fails", seconds_since=seconds_since
    )


def test_workers_that_were_just_set_aside_are_noticed_with_their_number_and_the_last_one():
    one = view_of(signals(set_aside=[set_aside("main-3", 5.0)])).judgements[0]
    assert one.why == "A worker was set aside, main-3 (failing): it fails."
    both = [set_aside("main-4", 5.0), set_aside("main-3", 599.0), set_aside("main-1", 600.0)]
    assert view_of(signals(set_aside=both)).judgements[0].why.startswith("2 workers were set aside")
    late = view_of(signals(set_aside=[set_aside("main-1", 600.0)]))
    assert late.judgements[0].name != "set aside"
