"""The arguments that `vcpo export` passes to its process."""

from datetime import date
from pathlib import Path

import pytest

from vcpo.api import VCPORun, load_run, parse_run
from vcpo.cli.export import export_arguments
from vcpo.local.run_dir import RunDir, new_run_dir
from vcpo.records.journal import METRICS_FILE


def test_export_passes_the_options_that_were_given():
    run_dir = Path("-runs/r")
    assert export_arguments(run_dir, None, step=None, best=False) == ["--", "-runs/r"]
    given = {"step": 0, "best": True, "model": "m", "trust_remote_code": True}
    options = ["--best", "--trust-remote-code", "--step=0", "--model=m"]
    assert export_arguments(run_dir, Path("--odd"), **given) == [*options, "--", "-runs/r", "--odd"]


def run_of(model: str = "models/tiny") -> VCPORun:
    return parse_run(f"""
        metadata: {{name: r}}
        spec: {{model: {{name: "{model}"}}, environment: {{name: countdown}}, steps: 3}}
    """)


@pytest.mark.parametrize("record", ["spec.yaml", METRICS_FILE])
def test_a_record_makes_a_directory_used(tmp_path, record):
    (tmp_path / record).touch()
    assert RunDir(tmp_path).is_used


def test_a_created_directory_holds_the_run(tmp_path):
    directory = RunDir(tmp_path / "runs" / "r")
    directory.create(run_of())
    assert directory.is_used
    written = load_run(directory.spec)
    assert written.start_date is not None
    assert written == run_of().begun_on(written.start_date)


def test_a_run_that_goes_on_keeps_the_day_on_which_it_began(tmp_path):
    directory, began = RunDir(tmp_path / "runs" / "r"), date(2026, 7, 26)
    directory.create(run_of().begun_on(began))
    directory.create(run_of("models/other"))  # another day's run file says nothing of it
    again = load_run(directory.spec)
    assert (again.start_date, again.spec.model.name) == (began, "models/other")


def test_a_start_that_fails_takes_nothing_from_a_run_that_it_would_resume(tmp_path):
    directory = RunDir(tmp_path / "r")
    directory.create(run_of())
    directory.remove_unused([tmp_path / "r"])
    assert directory.has_run
    assert directory.logs.is_dir()


def test_a_created_directory_forgets_processes_of_an_earlier_host(tmp_path):
    directory = RunDir(tmp_path)
    directory.create(run_of())
    directory.ready_file("learner").touch()
    directory.log("learner").touch()
    directory.create(run_of())
    assert not directory.ready_file("learner").exists()
    assert directory.log("learner").exists()


def test_a_number_in_use_is_passed_over(tmp_path):
    for name in ("r-001", "r-002", "other-003"):
        (tmp_path / name).mkdir()
    assert new_run_dir("r", tmp_path).path == tmp_path / "r-003"


def test_the_newest_checkpoint_is_a_whole_one(tmp_path):
    directory = RunDir(tmp_path)
    assert directory.newest_checkpoint_step is None
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-00000002", "step-00000010", "damaged-step-00000020", "step-00000030"):
        (checkpoints / name).mkdir(parents=True)
        if name != "step-00000030":  # whose files were removed by hand
            (checkpoints / name / "meta.json").touch()
    (checkpoints / ".step-00000040.partial").mkdir()
    (checkpoints / ".step-00000040.partial" / "meta.json").touch()
    assert directory.newest_checkpoint_step == 10
