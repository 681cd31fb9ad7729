"""examples/prometheus.yml finds the processes of a local run, as Prometheus' own tool reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ruamel.yaml import YAML

from tests.fixtures.rules.promtool import needs_promtool, promtool, run_promtool
from vcpo.local.processes.scrape_targets import ScrapeTarget, ScrapeTargetFile
from vcpo.local.run_dir import RunDir

pytestmark = needs_promtool
EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "prometheus.yml"
HOST = ScrapeTarget(pod="host", part="host", port=9100)
OTHER = ScrapeTarget(pod="host", part="host", port=9200)
WORKER = ScrapeTarget(pod="main-0", part="rollout", port=9102)


def test_the_example_is_a_valid_configuration():
    assert promtool("check", "config", EXAMPLE) == ""


def test_one_line_finds_two_runs_of_one_file_as_two_runs(tmp_path):
    example = tmp_path / "examples" / EXAMPLE.name
    example.parent.mkdir()
    shutil.copy(EXAMPLE, example)
    run_dirs = [RunDir(tmp_path / "runs" / f"sort-digits-{number:03d}") for number in (1, 2)]
    for run_dir, targets in zip(run_dirs, ([HOST, WORKER], [OTHER]), strict=True):
        run_dir.path.mkdir(parents=True)
        ScrapeTargetFile(run_dir.scrape_targets, run=run_dir.name).write(targets)
    found = run_promtool("check", "service-discovery", "--timeout=2s", example, "vcpo")
    labels = [target["labels"] for target in json.loads(found.stdout)]
    assert {each["instance"]: (each["run"], each["pod"], each["part"]) for each in labels} == {
        "127.0.0.1:9100": ("sort-digits-001", "host", "host"),
        "127.0.0.1:9102": ("sort-digits-001", "main-0", "rollout"),
        "127.0.0.1:9200": ("sort-digits-002", "host", "host"),
    }


def test_labels_of_the_target_win_over_those_of_the_processes_which_are_dropped():
    (scrape,) = YAML(typ="safe").load(EXAMPLE.read_text())["scrape_configs"]
    assert scrape["honor_labels"] is False
    assert scrape["metric_relabel_configs"] == [{"action": "labeldrop", "regex": "exported_.*"}]
