"""A small study as a user starts it: `vcpo study`, resumed, and reported on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDY = f"""
apiVersion: vcpo.dev/v1alpha1
kind: VCPOStudy
metadata: {{name: small}}
spec:
  run:
    model: {{name: {ROOT / "examples" / "models" / "tiny"}}}
    environment: {{name: sort_digits, parameters: {{digits: 3, style: plain}}}}
    steps: 4
    batch: {{promptsPerStep: 2, trajectoriesPerPrompt: 4}}
    sampling: {{maxNewTokens: 5}}
    evaluation: {{everySteps: 2, prompts: 8}}
  methods:
    - {{name: vcpo}}
    - {{name: plain, algorithm: {{baseline: groupMean, learningRateRule: none}}}}
  learningRates: [1.0e-4]
  lags: [0, 2]
  seeds: [1]
  tuning: {{seeds: [9]}}
  claims: {{lags: [0, 2], seeds: [1, 2]}}
  subject: vcpo
"""


def vcpo_study(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vcpo.cli.main", "study", "study.yaml", "--output=out", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.yaml").write_text(STUDY, encoding="utf-8")
    return folder


def test_a_study_is_run_in_part_finished_later_and_reported(folder):
    part = vcpo_study(folder, "--part=plane", "--lags=2", "--jobs=2")
    assert (part.returncode, part.stderr) == (0, "")
    assert "\nsmall plane: 2 cells, 2 at a time\n" in part.stdout
    assert "\nsmall claims: wait for 2 cells of the tuning\n" in part.stdout
    rest = vcpo_study(folder, "--jobs=2")
    assert rest.stdout.startswith("small tuning: 2 cells, 2 at a time\n")
    assert "\nsmall plane: 4 cells, 4 of them finished before, 2 at a time\n" in rest.stdout
    assert "\nsmall claims: 8 cells, 2 of them finished before, 2 at a time\n" in rest.stdout
    summary = json.loads((folder / "out" / "results.json").read_text())
    assert summary["command"] == "vcpo study study.yaml --output out"
    claims = summary["collapse_probability"]["small"]
    seeds = {method: {k: found[3] for k, found in own.items()} for method, own in claims.items()}
    assert seeds == {"vcpo": {"0": 2, "2": 2}, "plain": {"0": 2, "2": 2}}
    records = (folder / "out" / "results" / "small" / "cells").iterdir()
    assert len(list(records)) == 2 + 8


def test_a_study_without_time_starts_no_cell(folder, tmp_path):
    late = vcpo_study(folder, f"--output={tmp_path}", "--hours=1e-9")
    assert "small plane: time is up, 4 cells left; the same command continues\n" in late.stdout
    assert (late.returncode, late.stderr.count("holds no cell of these studies yet")) == (2, 1)


def test_a_method_that_the_study_lacks_is_a_users_error(folder):
    asked = vcpo_study(folder, "--only=grpo")
    assert asked.returncode == 2
    assert "--only: 'grpo' is no method of the study; it has ['plain', 'vcpo']" in asked.stderr
