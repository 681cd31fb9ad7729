"""The learner's process, before it trains."""

from __future__ import annotations

import sys

import pytest

from vcpo.lifecycle import DRAINED, StartError
from vcpo.run_lock import LockHolder, run_lock
from vcpo.wire.phase import RunPhase
from vcpo_learner import __main__ as command
from vcpo_learner import app


async def test_a_learner_leaves_a_directory_alone_that_another_one_trains_in(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_LOCK_PATIENCE_S", 0.0)
    options = app.Options(
        run_file=tmp_path / "absent.yaml",
        run_dir=tmp_path,
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        resume=True,
        drain_s=0.0,
        linger_s=0.0,
        ready_file=None,
        exit_with_parent=False,
    )
    with (
        run_lock(tmp_path, LockHolder.LEARNER),
        pytest.raises(StartError, match=r"another learner \(process \d+ on .+ works on this run"),
    ):
        await app.run_learner(options)


@pytest.mark.parametrize(
    ("phase", "status"),
    [(RunPhase.COMPLETE, 0), (RunPhase.FAILED, 1), (RunPhase.DRAINING, DRAINED)],
)
def test_the_exit_status_tells_a_complete_run_from_one_that_was_drained(phase, status, monkeypatch):
    async def run(_: app.Options) -> RunPhase:
        return phase

    monkeypatch.setattr(command, "run_learner", run)
    arguments = ["vcpo_learner", "run.yaml", "--run-dir=r", f"--drained-status={DRAINED}"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == status


def test_a_drained_pod_has_not_failed(monkeypatch):
    async def run(_: app.Options) -> RunPhase:
        return RunPhase.DRAINING

    monkeypatch.setattr(command, "run_learner", run)
    monkeypatch.setattr(sys, "argv", ["vcpo_learner", "run.yaml", "--run-dir=r"])
    assert command.main() == 0
