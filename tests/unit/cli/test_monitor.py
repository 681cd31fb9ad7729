"""`vcpo top`, `vcpo events` and `vcpo logs` as a user meets them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.fixtures.records import step_record
from vcpo.api import parse_run
from vcpo.cli.main import app
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import (
    EVENTS_FILE,
    JOURNAL_DAMAGED,
    METRICS_FILE,
    EventRecord,
    Journal,
)

USER_ERROR = 2
PATIENCE_S = 60.0
RUN = parse_run("""
metadata: {name: countdown}
spec: {model: {name: m}, environment: {name: countdown}, steps: 2}
""")


def vcpo(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was stopped after its first step."""
    directory = RunDir(tmp_path / "countdown-001")
    directory.create(RUN)
    journal = Journal(directory.path)
    journal.step(step_record(step=1, reward_mean=0.5, ess_ratio=0.25))
    for time_s, source, kind in ((2.0, "host", "Scaled"), (1.0, "learner", "Throttled")):
        journal.event(EventRecord(time_unix_s=time_s, source=source, kind=kind, message="m"))
    directory.log("learner").write_text("one\ntwo\n")
    return directory.path


def test_top_prints_a_row_for_each_run_where_nobody_can_press_keys(run_dir):
    shown = vcpo("top", run_dir.parent)
    assert shown.exit_code == 0
    header, row = shown.output.splitlines()
    assert header.split()[:4] == ["run", "status", "step", "reward"]
    assert row.split()[:4] == ["countdown-001", "stopped", "1/2", "0.500"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_top_says_which_directory_is_no_run_beside_the_others(run_dir, options):
    (run_dir.parent / "other").mkdir()
    (run_dir.parent / "other" / "spec.yaml").write_text("openapi: 3.0.0\n")
    shown = vcpo("top", run_dir.parent, *options)
    assert shown.exit_code == 0
    assert "countdown-001" in shown.stdout
    assert f"{run_dir.parent / 'other'}: " in shown.stderr
    assert "metadata: required field is missing" in shown.stderr


def test_top_prints_one_line_of_json_for_scripts(run_dir):
    (run,) = json.loads(vcpo("top", run_dir, "--json").output)["runs"]
    assert (run["place"], run["status"], run["relative_ess_ratio"]) == (
        str(run_dir),
        "stopped",
        0.25,
    )


def test_events_are_printed_by_time(run_dir):
    lines = vcpo("events", run_dir).output.splitlines()
    assert [line.split()[2:4] for line in lines] == [["learner", "Throttled"], ["host", "Scaled"]]
    first, _ = vcpo("events", run_dir, "--json").output.splitlines()
    assert json.loads(first)["kind"] == "Throttled"


def test_following_a_run_that_is_over_ends(run_dir):
    assert len(vcpo("events", run_dir, "--follow").output.splitlines()) == 2
    assert vcpo("logs", run_dir, "--follow").output == "learner | one\nlearner | two\n"


def test_logs_are_printed_after_the_name_of_their_process(run_dir):
    assert vcpo("logs", run_dir, "--tail", 1).output == "learner | two\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["top", "nowhere"], "DIR: no run in nowhere; give the directory that `vcpo run` printed"),
        (["events", "nowhere"], "RUN: nowhere has no run; give the directory"),
        (["logs", "nowhere"], "RUN: nowhere has no run; give the directory"),
    ],
)
def test_an_error_names_the_argument_and_the_cure(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = vcpo(*arguments)
    assert ended.exit_code == USER_ERROR
    assert words in " ".join(ended.stderr.split())


def test_a_part_without_a_log_is_an_error_that_names_those_with_one(run_dir):
    ended = vcpo("logs", run_dir, "--part", "lerner")
    assert ended.exit_code == USER_ERROR
    assert "no process 'lerner' has a log; those that have: learner" in ended.stderr


def test_in_a_terminal_enter_opens_a_run_and_q_ends(run_dir):
    """A real terminal: the keys are typed into a pseudo-terminal."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "vcpo.cli.main", "top", str(run_dir)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(terminal)
    try:
        shown = read_until(controller, "enter opens")
        assert "countdown-001" in shown
        os.write(controller, b"\r")
        shown = read_until(controller, "esc goes back")
        assert "Throttled: m" in shown
        os.write(controller, b"\x1b")
        read_until(controller, "enter opens")
        os.write(controller, b"q")
        assert process.wait(timeout=PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def read_until(controller: int, words: str) -> str:
    """Return what a terminal shows until it shows some words."""
    shown, deadline_s = "", time.monotonic() + PATIENCE_S
    while words not in shown:
        left_s = deadline_s - time.monotonic()
        assert select.select([controller], [], [], max(0.0, left_s))[0], f"no {words!r} in {shown}"
        shown += os.read(controller, 65_536).decode(errors="replace")
    return shown


@pytest.mark.parametrize(
    "command",
    [
        ["top"],
        ["top", "--json"],
        ["events"],
        ["logs"],
        ["report"],
        ["export", "--to", "tensorboard"],
    ],
    ids=" ".join,
)
def test_no_command_that_reads_a_run_fails_on_a_damaged_journal(run_dir, command):
    for name in (METRICS_FILE, EVENTS_FILE):
        whole = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(b"\xff\xfe\nnull\n[1]\n" + whole + b'{"type":"step"}\n')
    asked = vcpo(*command, run_dir)
    assert asked.exit_code == 0, asked.output
    assert "Traceback" not in asked.output
    if command == ["events"]:
        named = [line for line in asked.output.splitlines() if JOURNAL_DAMAGED in line]
        last, first_three = named
        assert "line 6:" in last
        assert "(3 of these since " in first_three
