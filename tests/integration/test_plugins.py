"""The packages of `examples/plugins`: installed beside the tree, and used by one real run."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vcpo.records.journal import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "environment", "loss", "tracker")
SPEC = f"""
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {{name: plugins}}
spec:
  model: {{name: {ROOT / "examples" / "models" / "tiny"}}}
  environment: {{name: "parity_task:Parity", parameters: {{digits: 3}}, promptFormat: plain}}
  steps: 4
  evaluation: {{everySteps: 1000, prompts: 4}}
  sampling: {{maxNewTokens: 8}}
  batch: {{promptsPerStep: 4, trajectoriesPerPrompt: 4}}
  algorithm:
    method: grpo
    loss: soft_clip:soft_clip
    baseline: soft_clip:length_weighted
    maxPolicyLagSteps: 1
  tracking:
    sinks:
      - {{name: "csv_tracker:CsvTracker", parameters: {{columns: [task/reward_mean]}}}}
  learner: {{threads: 1}}
  rollouts:
    - name: main
      engine: plain_engine:PlainEngine
      engineArguments: {{pause_ms: 0.5}}
      maxConcurrentSequences: 16
      threads: 1
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process that has the packages installed."""
    sources = tmp_path_factory.mktemp("sources")  # the build writes beside them
    for name in PACKAGES:
        shutil.copytree(ROOT / "examples" / "plugins" / name, sources / name)
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([*install, *(str(sources / name) for name in PACKAGES)], check=True, timeout=600)
    return {**os.environ, "PYTHONPATH": str(site)}


def test_engine_environment_loss_and_tracker_of_other_packages_train_a_model(installed, tmp_path):
    (tmp_path / "run.yaml").write_text(SPEC)
    command = [sys.executable, "-m", "vcpo.cli.main", "run", "run.yaml", "--json"]
    run = subprocess.run(
        [*command, "--run-dir", "run"],
        cwd=tmp_path,
        env=installed,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["steps"] == 4
    steps = read_metrics(tmp_path / "run").steps
    with (tmp_path / "run" / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["task/reward_mean"])) for row in rows] == [
        (record.step, record.reward_mean) for record in steps
    ]
    # The engine's log-probabilities are the learner's, up to the order of float32 sums.
    gap = steps[-1].mismatch["by_engine"]["plain_engine:PlainEngine"]
    assert 0.0 < gap < 1e-5
