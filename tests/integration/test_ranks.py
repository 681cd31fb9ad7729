"""A local run whose learner has two ranks: through the loss of one of them, and an interrupt."""

import os
import signal
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from tests.fixtures.tracking import tensorboard_scalars
from tests.integration.local_run import (
    LocalRun,
    StartRun,
    assert_accounting_is_exact,
    is_alive,
    wait_until,
)

TWO_RANKS = ", processes: 2"


def test_two_ranks_survive_a_kill_and_an_interrupt_and_the_run_goes_on_with_one(
    start_run: StartRun,
) -> None:
    sinks = "{name: tensorboard}"
    run = start_run(steps=60, learner=TWO_RANKS, sinks=sinks)
    run.wait_for_step(7)
    first, follower = run.pid_of("learner"), run.pid_of("learner-1")
    os.kill(follower, signal.SIGKILL)
    # Beyond the checkpoint of step 5, which the next processes begin from.
    wait_until(lambda: len(messages(run, "Resumed")) == 1, "a learner that resumed", run)
    run.wait_for_step(run.metrics.steps[-1].step + 3)
    pids = run.pids()
    os.kill(run.process.pid, signal.SIGINT)
    status, summary = run.finish()
    assert status == 130
    assert_a_killed_rank_restarted_both(run)
    stopped_at = summary["steps"]
    assert 7 < stopped_at < 60
    assert not any(is_alive(pid) for pid in (first, follower, *pids))
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
    # What the surviving history trained on: every step once, a full batch each.
    assert summary["trajectories"]["consumed"] == steps * 16
    assert [step.step for step in run.metrics.steps] == list(range(1, steps + 1))
    assert [step.ranks for step in run.metrics.steps] == [2] * stopped_at + [1] * 3
    shown = tensorboard_scalars(run.path / "tensorboard")["task/reward_mean"]
    assert shown == {
        step.step: pytest.approx(step.reward_mean) for step in run.metrics.steps
    }  # every step once, over all processes


def assert_a_killed_rank_restarted_both(run: LocalRun) -> None:
    (restarted,) = messages(run, "LearnerRestarted")
    assert restarted.startswith("rank 1 was killed by SIGKILL")
    assert "restart 1 of 3" in restarted
    started = messages(run, "LearnerStarted")
    assert len(started) == 2
    assert started[0].startswith("2 ranks; rank 0 is process")


def messages(run: LocalRun, kind: str) -> list[str]:
    return [event.message for event in run.events if event.kind == kind]
