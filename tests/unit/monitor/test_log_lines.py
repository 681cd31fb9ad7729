"""Logs on the terminal: of all processes or of one part, from the end, and followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vcpo.monitor.log_lines import LogTail, UnknownPartError, follow_logs, log_files


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    for name, lines in (("learner", "a\nb\n"), ("main-0", "c\n"), ("main-1", "d\nhalf")):
        (tmp_path / "logs" / f"{name}.log").write_text(lines)
    return tmp_path


def shown(run_dir: Path, part: str | None = None, tail: int | None = None) -> list[str]:
    lines = follow_logs(run_dir, part, tail=tail, is_over=lambda: True, sleep=lambda _: None)
    return [f"{line.process}:{line.text}" for line in lines]


def test_every_process_is_shown_and_half_a_line_waits(run_dir):
    assert shown(run_dir) == ["learner:a", "learner:b", "main-0:c", "main-1:d"]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("learner", ["learner:a", "learner:b"]),
        ("main", ["main-0:c", "main-1:d"]),
        ("main-1", ["main-1:d"]),
    ],
)
def test_a_part_is_a_process_or_the_workers_of_a_group(run_dir, part, expected):
    assert shown(run_dir, part) == expected


def test_a_part_that_is_not_there_is_answered_with_those_that_are(run_dir):
    expected = "no process 'mian' has a log; those that have: learner, main-0, main-1"
    with pytest.raises(UnknownPartError, match=expected):
        log_files(run_dir, "mian")


def test_only_the_last_lines_of_each_log_are_shown_if_so_wanted(run_dir):
    assert shown(run_dir, tail=1) == ["learner:b", "main-0:c", "main-1:d"]
    assert shown(run_dir, tail=0) == []


def test_a_followed_log_shows_what_is_written_and_processes_that_start(run_dir):
    turns = iter(["main-1", "main-2", None])

    def write_more(_: float) -> None:
        if (name := next(turns)) is not None:
            with (run_dir / "logs" / f"{name}.log").open("a") as log:
                log.write(" more\n")

    ends = iter([False, False, True])
    lines = follow_logs(run_dir, "main", tail=0, is_over=lambda: next(ends), sleep=write_more)
    assert [f"{line.process}:{line.text}" for line in lines] == ["main-1:half more"]


def test_lines_in_json_are_shown_as_text(run_dir):
    entry = {"time": "t", "level": "INFO", "message": "step 1", "exc_info": "Trace\nback"}
    (run_dir / "logs" / "learner.log").write_text(json.dumps(entry) + "\n")
    texts = [line.text for line in LogTail(run_dir / "logs" / "learner.log").read()]
    assert texts == ["step 1", "Trace", "back"]
