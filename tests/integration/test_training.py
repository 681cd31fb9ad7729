"""`vcpo.train`: a run that a program starts, follows, closes and goes on with."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import vcpo
from tests.integration.local_run import ROOT, SPEC, wait_for_exit
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import read_metrics
from vcpo.service.lifecycle import read_ready


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file in the folder at work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    path = tmp_path / "run.yaml"
    task = {"environment": "sort_digits", "adapters": "", "steps": 10_000, "lag": 4, "workers": 1}
    sections = {"control": "", "learner": "", "sinks": "", "failures": 32}
    path.write_text(SPEC.format(model=ROOT / "examples/models/tiny", **task, **sections))
    return path


PROGRAM = """
import vcpo

steps = vcpo.train("run.yaml", changes={"checkpoint.everySteps": 1000})
print(next(steps).step, next(steps).step, flush=True)
input()
"""


def test_a_run_ends_with_its_program_even_if_that_is_killed_and_can_be_gone_on_with(
    file: Path,
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    directory = RunDir(Path("runs/small-001"))
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "1 2\n"
        ready = map(read_ready, directory.processes.glob("*.json"))
        pids = [found.pid for found in ready if found is not None]
        program.kill()
    assert len(pids) == 2
    wait_for_exit(pids)
    saved = directory.newest_checkpoint_step
    assert saved == read_metrics(directory.path).steps[-1].step
    training = vcpo.train(file, changes={"steps": saved + 1}, run_dir=directory.path, resume=True)
    assert next(training).step == saved + 1
    assert training.wait()["state"] == "complete"
    assert (directory.model / "config.json").exists()


def test_a_run_that_is_closed_has_no_further_steps_and_is_no_error(file: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a program in the background
    try:
        with vcpo.train(file) as training:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(training) == []
    assert training.wait()["state"] == "interrupted"


def test_a_program_that_does_not_wait_is_told_so_at_its_end(file: Path) -> None:
    program = [sys.executable, "-c", "import vcpo; vcpo.train('run.yaml')"]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "the program ended before its run did" in ended.stderr
    assert "call wait()" in ended.stderr


def test_what_the_command_says_of_a_run_that_cannot_start_is_the_error(file: Path) -> None:
    training = vcpo.train(file, changes={"environment.name": "mine:Mine"})
    with pytest.raises(vcpo.TrainingError, match=r"spec\.environment\.name") as told:
        next(training)
    assert told.value.status == 2
    training.close()
    assert not training.run_dir.exists()
