"""`python -m vcpo_operator` reports a user's mistakes without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcpo_operator.__main__ import parser

IMAGES = ("--learner-image=l", "--rollout-image=r")


def operate(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the operator where there is no service account, in an empty home."""
    (folder / "kubeconfig").write_text("")
    outside = {key: value for key, value in os.environ.items() if "KUBERNETES" not in key}
    places = {"HOME": str(folder), "KUBECONFIG": str(folder / "kubeconfig")}
    command = [sys.executable, "-m", "vcpo_operator", *IMAGES]
    command += ["--metrics-listen=127.0.0.1:0", "--liveness-listen=127.0.0.1:0"]
    return subprocess.run(
        command, env=outside | places, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_cluster_the_operator_says_what_it_needs(tmp_path: Path):
    ended = operate(tmp_path)
    assert ended.returncode == 2
    assert " CRITICAL cannot reach the API server: " in ended.stderr
    assert "set KUBECONFIG to a kubeconfig that names a cluster" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_learners_are_asked_themselves_unless_a_prometheus_is_named():
    assert parser().parse_args(IMAGES).prometheus_url == ""


def test_images_have_to_be_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parser().parse_args([])
    assert "--learner-image, --rollout-image" in capsys.readouterr().err
