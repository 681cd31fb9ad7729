"""examples/prometheus.yml finds the processes of a local run, as Prometheus' own tool reads it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from vcpo.local.processes.scrape_targets import ScrapeTarget, ScrapeTargetFile
from vcpo.local.run_dir import RunDir

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH"
)
EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "prometheus.yml"
HOST = ScrapeTarget(pod="host", part="host", port=9100)
WORKER = ScrapeTarget(pod="main-0", part="rollout", port=9102)


def promtool(*arguments: str) -> str:
    command = ["promtool", "check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_is_a_valid_configuration():
    assert "SUCCESS" in promtool("config", str(EXAMPLE))


def test_a_prometheus_with_the_example_scrapes_each_process_under_its_labels(tmp_path):
    example = tmp_path / "examples" / EXAMPLE.name
    example.parent.mkdir()
    shutil.copy(EXAMPLE, example)
    run_dir = RunDir(tmp_path / "runs" / "sort-digits-001")
    run_dir.processes.mkdir(parents=True)
    ScrapeTargetFile(run_dir.scrape_targets, run="sort-digits").write([HOST, WORKER])
    found = promtool("service-discovery", "--timeout=2s", str(example), "vcpo")
    labels = [target["labels"] for target in json.loads(found)]
    assert {each["instance"]: (each["run"], each["pod"], each["part"]) for each in labels} == {
        "127.0.0.1:9100": ("sort-digits", "host", "host"),
        "127.0.0.1:9102": ("sort-digits", "main-0", "rollout"),
    }


def test_labels_of_the_processes_win_over_those_of_the_target():
    (scrape,) = YAML(typ="safe").load(EXAMPLE.read_text())["scrape_configs"]
    assert scrape["honor_labels"] is True
