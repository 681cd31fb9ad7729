"""The learner's process, before it trains."""

from __future__ import annotations

import pytest

from vcpo.lifecycle import StartError
from vcpo.run_lock import LockHolder, run_lock
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
