"""`vcpo report` as a user meets it: what is written, and what is refused."""

import errno
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.fixtures.records import EVALUATION, STEP
from vcpo.api import parse_run
from vcpo.cli.main import app
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import METRICS_FILE, Journal

USER_ERROR = 2
RUN = """
metadata: {name: countdown}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 400
"""


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def make_run(tmp_path):
    """Make the directory of a run with one step and one evaluation."""

    def make_run(name):
        directory = RunDir(tmp_path / name)
        directory.create(parse_run(RUN))
        journal = Journal(directory.path)
        journal.step(STEP)
        journal.evaluation(EVALUATION)
        return directory.path

    return make_run


@pytest.mark.parametrize("command", ["report", "export", "samples", "events", "logs", "run"])
def test_a_run_of_another_user_is_said_in_a_sentence(command, monkeypatch, tmp_path):
    real = Path.exists

    def exists(path):
        if str(path).startswith("/theirs"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    spec = "{model: {name: m}, environment: {name: countdown}, steps: 3}"
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"metadata: {{name: r}}\nspec: {spec}\n")
    monkeypatch.setattr(Path, "exists", exists)
    given = [run_file, "--run-dir", "/theirs"] if command == "run" else ["/theirs"]
    asked = CliRunner().invoke(app, [command, *map(str, given)])
    assert asked.exit_code == USER_ERROR
    assert "/theirs cannot be read (Permission denied); a run directory is for" in asked.stderr


@pytest.mark.parametrize("command", ["report", "export", "events", "logs"])
def test_records_without_a_run_file_are_no_run(tmp_path, command):
    (tmp_path / METRICS_FILE).touch()
    asked = CliRunner().invoke(app, [command, str(tmp_path)])
    assert (asked.exit_code, asked.stdout) == (USER_ERROR, "")
    assert f": {tmp_path} has no run; give the directory that `vcpo run` printed" in asked.stderr


def test_the_report_of_a_run_is_written_and_told(make_run):
    run_dir = make_run("[run]")
    asked = report(run_dir)
    assert (asked.exit_code, asked.stdout) == (0, f"{run_dir / 'report.html'}\n")
    assert "countdown" in (run_dir / "report.html").read_text(encoding="utf-8")
    asked = report(run_dir, "--output", run_dir / "here.html")
    assert (asked.exit_code, asked.stdout) == (0, f"{run_dir / 'here.html'}\n")


def test_several_runs_are_compared_on_one_page(make_run):
    first, second = make_run("a"), make_run("b")
    asked = report(first, second)
    assert (asked.exit_code, asked.stdout) == (0, f"{first / 'comparison.html'}\n")
    assert "b, held out" in (first / "comparison.html").read_text(encoding="utf-8")
    assert report(first, first.parent).exit_code == USER_ERROR
