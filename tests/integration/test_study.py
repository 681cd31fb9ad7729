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
    optimizer: {{learningRate: 1e-4}}
    evaluation: {{everySteps: 2, prompts: 8}}
  methods:
    - {{name: vcpo}}
    - {{name: plain, algorithm: {{baseline: groupMean, learningRateRule: none}}}}
  lags: [0, 2]
  seeds: [1]
  subject: vcpo
"""


def vcpo_study(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vcpo.cli.main", "study", "study.yaml", "--dir=out", *arguments],
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
    part = vcpo_study(folder, "--lags=0", "--jobs=2")
    assert (part.returncode, part.stderr) == (0, "")
    assert part.stdout.startswith("grid: 2 cells, 2 at a time\n")
    rest = vcpo_study(folder, "--jobs=2")
    assert rest.stdout.startswith("grid: 4 cells, 2 of them finished before, 2 at a time\n")
    summary = json.loads((folder / "out" / "results.json").read_text())
    places = [(row["method"], row["lag"], row["num_seeds"]) for row in summary["grid"]]
    assert places == [("vcpo", 0, 1), ("plain", 0, 1), ("vcpo", 2, 1), ("plain", 2, 1)]
    assert summary["command"] == "vcpo study study.yaml"


def test_a_method_that_the_study_lacks_is_a_users_error(folder):
    asked = vcpo_study(folder, "--only=grpo")
    assert asked.returncode == 2
    assert "--only: 'grpo' is no method of the study; it has ['plain', 'vcpo']" in asked.stderr
