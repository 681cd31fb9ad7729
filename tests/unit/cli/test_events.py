"""`vcpo events` and `vcpo logs` as a user meets them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vcpo.api import parse_run
from vcpo.cli.main import app
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import EventRecord, Journal

USER_ERROR = 2
RUN = parse_run("""
metadata: {name: countdown}
spec: {model: {name: m}, environment: {name: countdown}, steps: 2}
""")


def vcpo(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = RunDir(tmp_path / "countdown-001")
    directory.create(RUN)
    for name, lines in (("learner", "a\nb\n"), ("main-0", "c\n"), ("main-1", "d\nhalf")):
        directory.log(name).write_text(lines)
    return directory.path


def write_events(run_dir: Path, *events: tuple[float, str, str, str]) -> None:
    journal = Journal(run_dir)
    for time_s, source, kind, message in events:
        journal.event(EventRecord(time_unix_s=time_s, source=source, kind=kind, message=message))


def test_events_of_host_and_learner_are_printed_by_time(run_dir):
    write_events(
        run_dir, (2e9, "ho\x1bt", "Sca\x1bed", "b\x1b]0;"), (1e9, "learner", "Throttled", "a")
    )
    first, second = vcpo("events", run_dir).output.splitlines()
    assert first == "2001-09-09 01:46:40Z  learner  Throttled            a"
    assert second == "2033-05-18 03:33:20Z  ho t     Sca ed               b ]0;"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["learner | a", "learner | b", "main-0 | c", "main-1 | d", "main-1 | half"]),
        (["--part", "main"], ["main-0 | c", "main-1 | d", "main-1 | half"]),
        (["--part", "main-0"], ["main-0 | c"]),
        (["--tail", 1], ["learner | b", "main-0 | c", "main-1 | half"]),
    ],
    ids=str,
)
def test_logs_are_printed_after_the_name_of_their_process(run_dir, options, expected):
    assert vcpo("logs", run_dir, *options).output.splitlines() == expected


def test_a_part_without_a_log_is_an_error_that_names_those_with_one(run_dir):
    ended = vcpo("logs", run_dir, "--part", "lerner")
    assert ended.exit_code == USER_ERROR
    assert "no process 'lerner' has a log; those that have: learner, main-0" in ended.stderr
