"""The file by which a Prometheus finds the processes of a local run."""

from __future__ import annotations

import json

import pytest

from vcpo.local.processes.scrape_targets import ScrapeTarget, ScrapeTargetFile, target_groups

HOST = ScrapeTarget(pod="host", part="host", port=9100)
WORKER = ScrapeTarget(pod="main-0", part="rollout", port=9102)


def test_each_process_has_its_address_and_its_labels():
    assert target_groups("countdown", [HOST, WORKER]) == [
        {
            "targets": ["127.0.0.1:9100"],
            "labels": {"run": "countdown", "pod": "host", "part": "host"},
        },
        {
            "targets": ["127.0.0.1:9102"],
            "labels": {"run": "countdown", "pod": "main-0", "part": "rollout"},
        },
    ]


def test_the_file_holds_the_targets_written_last(tmp_path):
    file = ScrapeTargetFile(tmp_path / "prometheus.json", run="r")
    for targets in ([HOST], [HOST, WORKER], [WORKER]):
        file.write(targets)
        assert json.loads(file.path.read_text()) == target_groups("r", targets)


def test_a_run_without_processes_has_no_file(tmp_path):
    file = ScrapeTargetFile(tmp_path / "prometheus.json", run="r")
    for targets in ([], [HOST], []):
        file.write(targets)
        assert file.path.exists() is bool(targets)
    file.write([HOST])
    assert json.loads(file.path.read_text()) == target_groups("r", [HOST])


def test_targets_that_did_not_change_are_not_written_again(tmp_path):
    file = ScrapeTargetFile(tmp_path / "prometheus.json", run="r")
    file.write([HOST])
    file.path.unlink()
    file.write([HOST])
    assert not file.path.exists()


def test_a_reader_never_sees_half_a_file_and_no_other_file_stays(tmp_path):
    file = ScrapeTargetFile(tmp_path / "prometheus.json", run="r")
    file.write([HOST])
    with file.path.open() as opened_before:
        file.write([HOST, WORKER])
        assert json.load(opened_before) == target_groups("r", [HOST])
    assert [each.name for each in tmp_path.iterdir()] == ["prometheus.json"]


def test_a_write_that_failed_is_made_up_for_by_the_next(tmp_path):
    folder = tmp_path / "prometheus"
    file = ScrapeTargetFile(folder / "r.json", run="r")
    folder.write_text("in the way")
    with pytest.raises(FileExistsError):
        file.write([HOST])
    folder.unlink()
    file.write([HOST])
    assert json.loads(file.path.read_text()) == target_groups("r", [HOST])
