"""`vcpo export RUN --to`: the records of a run in a tracking service, afterwards."""

import dataclasses

import pytest
from typer.testing import CliRunner

from tests.fixtures.records import EVALUATION, STEP
from tests.fixtures.tracking import tensorboard_scalars, wandb_history, wandb_ids
from vcpo.api import parse_run
from vcpo.cli.main import app
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import EventRecord, Journal

USER_ERROR = 2
RUN = """
metadata: {name: countdown}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 6
  tracking: {sinks: [{name: wandb, project: puzzles}]}
"""
REWARD = "task/reward_mean"


def vcpo(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_dir(tmp_path):
    """A run that took steps 1 to 4, came back from a checkpoint of step 2, and took 3 to 6."""
    directory = RunDir(tmp_path / "run")
    directory.create(parse_run(RUN))
    journal = Journal(directory.path)
    journal.evaluation(dataclasses.replace(EVALUATION, step=0, time_unix_s=1000.0))
    for number, step in enumerate([1, 2, 3, 4, 3, 4, 5, 6], start=1):
        record = dataclasses.replace(
            STEP, step=step, time_unix_s=1000.0 + number, reward_mean=number / 8
        )
        journal.step(record)
    journal.event(
        EventRecord(time_unix_s=1004.5, source="learner", kind="Resumed", message="step 2")
    )
    return directory.path


REWARDS = {1: 1 / 8, 2: 2 / 8, 3: 5 / 8, 4: 6 / 8, 5: 7 / 8, 6: 1.0}
"""Of the surviving history."""


def test_a_second_copy_for_tensorboard_replaces_the_first_and_leaves_other_files(run_dir):
    kept = run_dir / "exports/tensorboard/events.out.tfevents.1.host"
    kept.parent.mkdir(parents=True)
    kept.touch()
    for _ in range(2):
        asked = vcpo("export", run_dir, "--to", "tensorboard")
        assert (asked.exit_code, asked.stderr) == (0, "")
    assert asked.stdout == f"8 records copied to tensorboard: {kept.parent}\n"
    assert tensorboard_scalars(kept.parent)[REWARD] == REWARDS
    assert len(list(kept.parent.iterdir())) == 2


def test_a_copy_for_weights_and_biases_can_be_sent_later(run_dir):
    asked = vcpo("export", run_dir, "--to", "wandb", "--offline")
    assert asked.exit_code == 0, asked.stderr
    rows = wandb_history(run_dir / "wandb")
    assert {step: row[REWARD] for step, row in rows if REWARD in row} == REWARDS
    assert len(wandb_ids(run_dir / "wandb")) == 1


def test_a_service_that_refuses_ends_the_copy_with_its_words(run_dir):
    (run_dir / "exports").touch()  # a file where a folder must be
    asked = vcpo("export", run_dir, "--to", "tensorboard")
    assert asked.exit_code == USER_ERROR
    assert asked.stderr.startswith("--to tensorboard: ")
