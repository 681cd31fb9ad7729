"""The real clients of the three services, and what is in their files afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.fixtures.records import STEP
from tests.fixtures.tracking import (
    tensorboard_scalars,
    tensorboard_texts,
    wandb_history,
    wandb_ids,
)
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.spec import SpecError, VCPORun
from vcpo.spec.tracking import Sink, SinkName, Tracking
from vcpo.tracking import services
from vcpo.tracking.services import check_packages, open_sink
from vcpo.tracking.sink import TrackedRun

REWARD = "task/reward_mean"
EVALUATION = EvaluationRecord(
    step=2, time_unix_s=1002.5, accuracy=0.25, num_trajectories=4, policy_version_min=2,
    policy_version_max=2,
)  # fmt: skip
EVENT = EventRecord(time_unix_s=1001.5, source="learner", kind="CheckpointSaved", message="step 1")


def make_run(**parameters: Any) -> VCPORun:
    return VCPORun.model_validate(
        {
            "metadata": {"name": "demo", "annotations": {"vcpo.dev/run-folder": "/srv/me"}},
            "spec": {
                "model": {"name": "m"},
                "environment": {"name": "own.module:Task", "parameters": parameters},
                "steps": 10,
            },
        }
    )


def steps(first, last, *, reward):
    return [
        dataclasses.replace(STEP, step=step, reward_mean=reward, time_unix_s=1000.0 + step)
        for step in range(first, last + 1)
    ]


def train_fall_back_and_train(settings: Sink, run_dir: Path) -> None:
    """Five steps with reward 0.25; a restart from the checkpoint of step 3; steps 4 to 7 at 0.5."""
    sink = open_sink(settings, TrackedRun(run=make_run(), run_dir=run_dir))
    for record in steps(1, 1, reward=0.25):
        sink.step(record)
    sink.event(EVENT, 1)
    for record in steps(2, 5, reward=0.25):
        sink.step(record)
    sink.evaluation(EVALUATION)
    sink.close(failed=True)
    again = TrackedRun(run=make_run(), run_dir=run_dir, first_step=4, furthest_step=5)
    sink = open_sink(settings, again)
    for record in steps(4, 7, reward=0.5):
        sink.step(record)
    sink.close(failed=False)


FIRST_TIME_KEPT = {**dict.fromkeys(range(1, 6), 0.25), 6: 0.5, 7: 0.5}
"""Rewards by step of a service that cannot take back what it was sent."""
NEWEST_KEPT = {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.5}


def test_tensorboard_shows_the_newest_history(tmp_path):
    train_fall_back_and_train(Sink(name=SinkName.TENSORBOARD), tmp_path)
    points = tensorboard_scalars(tmp_path / "tensorboard")
    assert points[REWARD] == NEWEST_KEPT
    assert points["evaluation/evaluation_accuracy"] == {2: 0.25}
    assert tensorboard_texts(tmp_path / "tensorboard")["events/CheckpointSaved"] == "step 1"


def test_tensorboard_writes_to_the_folder_of_the_spec(tmp_path):
    settings = Sink(name=SinkName.TENSORBOARD, directory=str(tmp_path / "shared"))
    train_fall_back_and_train(settings, tmp_path)
    assert tensorboard_scalars(tmp_path / "shared")[REWARD] == NEWEST_KEPT


def test_weights_and_biases_continues_one_run_and_keeps_the_first_history(tmp_path):
    train_fall_back_and_train(Sink(name=SinkName.WANDB, mode="offline"), tmp_path)
    ids = set(wandb_ids(tmp_path / "wandb"))
    assert len(ids) == 1
    rows = wandb_history(tmp_path / "wandb")
    assert {step: row[REWARD] for step, row in rows if REWARD in row} == FIRST_TIME_KEPT
    written = [step for step, row in rows if REWARD in row]
    assert written == sorted(set(written))
    (evaluated,) = (row for _, row in rows if "evaluation/evaluation_accuracy" in row)
    assert (evaluated["evaluation/evaluation_accuracy"], evaluated["evaluation/step"]) == (0.25, 2)
    assert [step for step, row in rows if "events/CheckpointSaved" in row] == [1]


def mlflow_settings(folder: Path) -> Sink:
    return Sink(name=SinkName.MLFLOW, url=f"file://{folder / 'mlruns'}", project="demos")


def test_mlflow_continues_one_run_and_keeps_the_first_history(tmp_path):
    train_fall_back_and_train(mlflow_settings(tmp_path), tmp_path)
    client = MlflowClient(tracking_uri=f"file://{tmp_path / 'mlruns'}")
    (run,) = client.search_runs([client.get_experiment_by_name("demos").experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    history = client.get_metric_history(run.info.run_id, REWARD)
    assert {point.step: point.value for point in history} == FIRST_TIME_KEPT
    assert len(history) == len(FIRST_TIME_KEPT)
    assert run.data.metrics["evaluation/evaluation_accuracy"] == 0.25
    assert run.data.tags["events/CheckpointSaved"] == "step 1"
    assert (run.data.params["model.name"], run.data.params["steps"]) == ("m", "10")


def test_a_failed_run_is_shown_as_failed(tmp_path):
    tracked = TrackedRun(run=make_run(), run_dir=tmp_path)
    open_sink(mlflow_settings(tmp_path), tracked).close(failed=True)
    client = MlflowClient(tracking_uri=f"file://{tmp_path / 'mlruns'}")
    assert client.get_run(tracked.known_id(SinkName.MLFLOW)).info.status == "FAILED"


def test_services_get_what_is_trained_and_no_password_path_or_pod(tmp_path):
    run = make_run(reward="https://me:secret@grader.example/v1", style="plain")
    sent = TrackedRun(run=run, run_dir=tmp_path).settings
    assert sent["environment"]["parameters"] == {
        "reward": "https://***@grader.example/v1",
        "style": "plain",
    }
    assert {"pods", "learner", "rollouts", "metadata"}.isdisjoint(sent)
    assert sent["steps"] == 10


def test_a_missing_package_is_named_with_its_field_and_the_extra(monkeypatch):
    monkeypatch.setitem(services._PACKAGES, SinkName.WANDB, "a_package_that_nobody_has")
    tracking = Tracking(sinks=(Sink(name="tensorboard"), Sink(name="wandb")))
    with pytest.raises(SpecError, match=r"sinks\[1\]\.name: needs the package a_package.*vcpo\[tr"):
        check_packages(tracking)
