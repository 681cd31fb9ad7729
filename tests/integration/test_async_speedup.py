"""A run of `benchmarks.async_speedup`: real processes, paced."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.async_speedup.hardware import REFERENCE
from benchmarks.async_speedup.paced_learner import (
    PUBLICATION_SECONDS_VARIABLE,
    STEP_SECONDS_VARIABLE,
)
from benchmarks.async_speedup.trial import Setting, run_trial

PAUSE_S = 0.5


def test_a_paced_run_begins_with_all_workers_and_leaves_checkpoints_that_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "PYTHONPATH",
        STEP_SECONDS_VARIABLE,
        PUBLICATION_SECONDS_VARIABLE,
    ):  # for the end: the trial sets both
        monkeypatch.setenv(name, os.environ.get(name, ""))
    setting = Setting(lag=2, workers=2, steps=4, seed=1)
    hardware = replace(REFERENCE.faster(1000.0), learner_step_s=PAUSE_S)
    found = run_trial(setting, hardware, tmp_path / "run", prompts=256)
    steps = found.metrics.steps
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert {step.workers for step in steps} == {2}
    assert max(step.lag_max for step in steps) <= 2
    assert all(step.step_s >= PAUSE_S for step in steps)
    assert list(found.accuracies) == [0, 4]
    assert 0.2 < found.accuracies[0] < 0.6
    assert found.accuracies[4] != found.accuracies[0]
