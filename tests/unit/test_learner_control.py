"""What the learner tells its host arrives as it was meant."""

import pytest

from tests.fixtures.records import step_record
from tests.fixtures.signals import signals_message
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.learner_control import run_signals
from vcpo.wire.v1 import control_pb2


def test_the_record_of_the_last_step_arrives_whole():
    record = {"step": 7, "warning_level": "critical", "dropped": {"stale": 2}, "ess_ratio": 0.25}
    seen = run_signals(signals_message(**record))
    assert seen.last == step_record(**record)
    assert (seen.step, seen.warning_level) == (7, WarningLevel.CRITICAL)


def test_before_the_first_step_there_is_no_record():
    seen = run_signals(signals_message())
    assert (seen.last, seen.step, seen.warning_level, seen.relative_ess_ratio) == (
        None,
        0,
        None,
        None,
    )
    assert (seen.accuracy, seen.effective_rate) == (None, None)


def test_workers_are_known_by_the_name_of_their_pod():
    worker = control_pb2.Worker(
        worker_id="demo-rollout-main-x", rollout_group="main", silent_s=2.5, in_flight=6
    )
    seen = run_signals(signals_message(workers=[worker]))
    found = seen.workers["demo-rollout-main-x"]
    assert (found.in_flight, found.silent_s) == (6, 2.5)
    assert seen.ready_workers == {"main": 1}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (signals_message(step=3, warning_level="odd"), "warning_level"),
        (signals_message(step=3, ess_ratio_mean=1.5), "ess_ratio_mean"),
        (signals_message(step=3, on_policy_ess_ratio=0.0), "on_policy_ess_ratio"),
        (signals_message(learner_idle_ratio=float("nan")), "learner_idle_ratio"),
        (signals_message(batch_trajectories=0), "batch_trajectories"),
        (control_pb2.Signals(last_step="{}", batch_trajectories=1), "reward_mean"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_field(message, field):
    with pytest.raises(ValueError, match=field):
        run_signals(message)
