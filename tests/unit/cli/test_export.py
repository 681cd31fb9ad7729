"""`vcpo export RUN --to`: the records of a run in a tracking service, afterwards."""

from __future__ import annotations

import dataclasses

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from tests.fixtures.records import EVALUATION, STEP
from tests.fixtures.tracking import tensorboard_scalars, wandb_history, wandb_ids
from vcpo.api import parse_run
from vcpo.cli.main import app
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import EventRecord, Journal
from vcpo.tracking.queued_sink import ordered_records

USER_ERROR = 2
RUN = """
metadata: {name: countdown}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 6
  tracking: {sinks: [{name: mlflow, project: puzzles}]}
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


def test_records_come_in_order_without_undone_history(run_dir):
    named = [(type(record).__name__, step) for record, step in ordered_records(run_dir)]
    assert named == [
        ("EvaluationRecord", 0),
        ("StepRecord", 1),
        ("StepRecord", 2),
        ("EventRecord", 2),
        *(("StepRecord", step) for step in (3, 4, 5, 6)),
    ]


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


def test_a_second_copy_for_mlflow_adds_nothing(run_dir, tmp_path):
    url = f"file://{tmp_path / 'mlruns'}"
    for _ in range(2):
        asked = vcpo("export", run_dir, "--to", "mlflow", "--url", url)
        assert asked.exit_code == 0, asked.stderr
    client = MlflowClient(tracking_uri=url)
    (run,) = client.search_runs([client.get_experiment_by_name("puzzles").experiment_id])
    assert run.info.run_name == "countdown (copy)"
    history = client.get_metric_history(run.info.run_id, REWARD)
    assert [(point.step, point.value) for point in history] == list(REWARDS.items())
    assert len(client.get_metric_history(run.info.run_id, "events/Resumed")) == 1


def test_a_copy_for_weights_and_biases_can_be_sent_later(run_dir):
    asked = vcpo("export", run_dir, "--to", "wandb", "--offline")
    assert asked.exit_code == 0, asked.stderr
    rows = wandb_history(run_dir / "wandb")
    assert {step: row[REWARD] for step, row in rows if REWARD in row} == REWARDS
    assert len(wandb_ids(run_dir / "wandb")) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--project", "p"], "--project, --url, --offline: need --to"),
        (["--to", "mlflow", "--step", 3], "DIR, --step, --best, --adapters: choose what"),
        (["--to", "mlflow", "--output", "x"], "--output: mlflow has no folder"),
        (
            ["--to", "mlflow", "--offline"],
            "--offline: sink 'mlflow' does not use it; remove it (got 'offline')\n",
        ),
        (["--to", "tensorboard", "--project", "p"], "--project: sink 'tensorboard' does not use"),
        (["--to", "mlflow", "--url", "mlflow:5000"], "--url: "),
        (["--to", "mlflow"], "url: is not set, and neither is MLFLOW_TRACKING_URI; give"),
        (["--to", "comet"], "tensorboard"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_cure(run_dir, options, words, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    asked = vcpo("export", run_dir, *options)
    assert asked.exit_code == USER_ERROR
    assert words in asked.stderr
    assert "validation error" not in asked.stderr
    assert "Traceback" not in asked.stderr


def test_a_service_that_refuses_ends_the_copy_with_its_words(run_dir, tmp_path):
    (tmp_path / "mlruns").touch()  # a file where a folder must be
    asked = vcpo("export", run_dir, "--to", "mlflow", "--url", f"file://{tmp_path / 'mlruns'}")
    assert asked.exit_code == USER_ERROR
    assert asked.stderr.startswith("--to mlflow: ")
