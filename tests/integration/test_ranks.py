"""Local runs whose learner has two ranks: completed, and through the loss of one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from tests.fixtures.tracking import tensorboard_scalars
from tests.integration.local_run import StartRun, assert_accounting_is_exact, is_alive

TWO_RANKS = ", processes: 2"


def test_two_ranks_train_as_one_and_a_killed_one_restarts_both_from_the_checkpoint(
    start_run: StartRun,
) -> None:
    run = start_run(steps=16, learner=TWO_RANKS)
    run.wait_for_step(7)
    first = run.pid_of("learner")
    follower = run.pid_of("learner-1")
    os.kill(follower, signal.SIGKILL)
    status, summary = run.finish()
    assert status == 0
    assert (summary["steps"], summary["ranks"]) == (16, 2)
    # What the surviving history trained on: every step once, a full batch each.
    assert summary["trajectories"]["consumed"] == 16 * 16
    assert [step.step for step in run.metrics.steps] == list(range(1, 17))
    assert {step.ranks for step in run.metrics.steps} == {2}
    (restarted,) = [event.message for event in run.events if event.kind == "LearnerRestarted"]
    assert restarted.startswith("rank 1 was killed by SIGKILL")
    assert "restart 1 of 3" in restarted
    (resumed,) = [event.message for event in run.events if event.kind == "Resumed"]
    assert resumed
    started = [event.message for event in run.events if event.kind == "LearnerStarted"]
    assert len(started) == 2
    assert started[0].startswith("2 ranks; rank 0 is process")
    assert not any(is_alive(pid) for pid in (first, follower, *run.pids()))
    assert AutoModelForCausalLM.from_pretrained(run.path / "model").num_parameters() > 100_000


def test_an_interrupted_run_of_two_ranks_saves_leaves_and_goes_on_with_one(
    start_run: StartRun,
) -> None:
    sinks = "{name: tensorboard}"
    run = start_run(steps=60, learner=TWO_RANKS, sinks=sinks)
    run.wait_for_step(3)
    pids = run.pids()
    run.process.send_signal(signal.SIGINT)
    status, summary = run.finish()
    stopped_at = summary["steps"]
    assert status == 130
    assert 3 <= stopped_at < 60
    assert not any(is_alive(pid) for pid in pids)
    saved = run.path / "checkpoints" / f"step-{stopped_at:08d}"
    assert (saved / "meta.json").exists()
    export = [sys.executable, "-m", "vcpo.cli.main", "export", str(run.path)]
    exported = subprocess.run(export, capture_output=True, text=True, check=True).stdout.strip()
    assert exported == str(run.path / "exports" / f"step-{stopped_at:08d}")
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 100_000
    steps = stopped_at + 3
    status, summary = start_run("--resume", steps=steps, sinks=sinks).finish()
    assert (status, summary["ranks"], summary["steps"]) == (0, 1, steps)
    assert_accounting_is_exact(summary)
    assert summary["trajectories"]["consumed"] == steps * 16
    assert [step.step for step in run.metrics.steps] == list(range(1, steps + 1))
    shown = tensorboard_scalars(run.path / "tensorboard")["task/reward_mean"]
    assert shown == {
        step.step: pytest.approx(step.reward_mean) for step in run.metrics.steps
    }  # every step once, over both processes
