"""The learner's process: start, phases and end."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.fixtures.learner.options import options
from vcpo.service.lifecycle import DRAINED, StartError
from vcpo.service.run_lock import LockHolder, run_lock
from vcpo.wire.phase import RunPhase
from vcpo_learner import __main__ as command
from vcpo_learner import app
from vcpo_learner.ranks.environment import RankEnvironment
from vcpo_learner.telemetry.gauges import LearnerGauges


async def test_a_learner_leaves_a_directory_alone_that_another_one_trains_in(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_LOCK_PATIENCE_S", 0.0)
    with (
        run_lock(tmp_path, LockHolder.LEARNER),
        pytest.raises(StartError, match=r"another learner \(process \d+ on .+ works on this run"),
    ):
        await app.run_learner(options(tmp_path, resume=True), RankEnvironment())


async def test_metrics_that_cannot_be_kept_up_to_date_end_no_run(tmp_path, monkeypatch, caplog):
    refreshed = []

    def refresh(gauges: LearnerGauges) -> None:
        refreshed.append(gauges)
        if len(refreshed) == 3:
            gauges._dispatcher.drain()
        raise ValueError("counters go up only")

    monkeypatch.setattr(LearnerGauges, "refresh", refresh)
    monkeypatch.setattr(app, "_REFRESH_S", 0.0)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "metadata: {name: r}\nspec:\n  model: {name: examples/models/tiny}\n  steps: 1\n"
        "  environment: {name: sort_digits}\n  sampling: {maxNewTokens: 8}\n"
    )
    async with asyncio.timeout(30):
        phase = await app.run_learner(options(tmp_path, run_file=run_file), RankEnvironment())
    assert phase is RunPhase.DRAINING
    assert len(refreshed) >= 3
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert "counters go up only" in logged.exc_text


@pytest.mark.parametrize(
    ("phase", "status"),
    [(RunPhase.COMPLETE, 0), (RunPhase.FAILED, 1), (RunPhase.DRAINING, DRAINED)],
)
def test_the_exit_status_tells_a_complete_run_from_one_that_was_drained(phase, status, monkeypatch):
    async def run(*_: object) -> RunPhase:
        return phase

    monkeypatch.setattr(command, "run_learner", run)
    arguments = ["vcpo_learner", "run.yaml", "--run-dir=r", f"--drained-status={DRAINED}"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == status


def test_a_drained_pod_has_not_failed(monkeypatch):
    async def run(*_: object) -> RunPhase:
        return RunPhase.DRAINING

    monkeypatch.setattr(command, "run_learner", run)
    monkeypatch.setattr(sys, "argv", ["vcpo_learner", "run.yaml", "--run-dir=r"])
    assert command.main() == 0
