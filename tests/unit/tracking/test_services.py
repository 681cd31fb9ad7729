"""The real clients of the three services, and what is in their files afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.fixtures.samples import make_sample
from tests.fixtures.tracked_process import TrackedProcess, step_of
from tests.fixtures.tracking import (
    tensorboard_scalars,
    tensorboard_texts,
    wandb_history,
    wandb_ids,
)
from vcpo.api import SpecError, VCPORun
from vcpo.api.tracking import Sink, SinkName, Tracking
from vcpo.records.journal import EvaluationRecord, EventRecord, Journal, read_metrics
from vcpo.records.samples import write_answers
from vcpo.tracking import services
from vcpo.tracking.scalars import LAST_NAME, step_scalars
from vcpo.tracking.services import check_sinks, open_sink
from vcpo.tracking.sink import TrackedRun

REWARD = "task/reward_mean"


@pytest.fixture(autouse=True)
def mlflow_reads_folders(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


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
    return [step_of(step, reward) for step in range(first, last + 1)]


def train_fall_back_and_train(settings: Sink, run_dir: Path) -> None:
    """Five steps with reward 0.25; a restart from the checkpoint of step 3; steps 4 to 7 at 0.5."""
    process = TrackedProcess(run_dir, settings)
    process.put(
        *steps(1, 1, reward=0.25), EVENT, *steps(2, 2, reward=0.25), EVALUATION,
        *steps(3, 5, reward=0.25),
    )  # fmt: skip
    process.close(failed=True)
    process = TrackedProcess(run_dir, settings)
    process.put(*steps(4, 7, reward=0.5))
    process.close()


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


@pytest.mark.parametrize("name", SinkName)
def test_every_step_of_the_journal_is_in_the_service_after_two_kills(tmp_path, name):
    settings = all_settings(tmp_path)[name]
    for first, last, end in ((1, 16, "kill"), (17, 22, "kill-at-once")):
        died = run_process(tmp_path, settings, first, last, end)
        assert died.returncode == -signal.SIGKILL, died.stderr
    process = TrackedProcess(tmp_path, settings)
    process.put(*(step_of(step, step / 64) for step in range(23, 26)))
    process.close()
    assert process.tracker.dropped == {name: 0}
    recorded = read_metrics(tmp_path).steps
    expected = {step.step: step_scalars(step)[REWARD] for step in recorded}
    assert expected == {step: step / 64 for step in range(1, 26)}
    assert shown(tmp_path, name, REWARD) == expected
    assert shown(tmp_path, name, LAST_NAME) == dict.fromkeys(expected, 0.0)


@pytest.mark.parametrize("name", SinkName)
def test_a_step_that_was_dropped_comes_at_the_next_start_where_the_service_takes_it(tmp_path, name):
    settings = all_settings(tmp_path)[name]
    process = TrackedProcess(tmp_path, settings)
    process.put(*steps(1, 2, reward=0.25))
    process.close()
    for record in steps(3, 4, reward=0.25):  # as if the service had been away
        Journal(tmp_path).step(record)
    process = TrackedProcess(tmp_path, settings)
    process.put(*steps(5, 6, reward=0.25))
    process.close()
    assert shown(tmp_path, name, REWARD) == dict.fromkeys(range(1, 7), 0.25)


@pytest.mark.parametrize("has_step", [True, False])
def test_what_comes_before_the_first_step_of_a_resumed_service_makes_no_row_of_its_own(
    tmp_path, has_step
):
    # A row with a mark alone would be taken for a step that the service has.
    settings = all_settings(tmp_path)[SinkName.WANDB]
    sink = open_sink(settings, TrackedRun(run=make_run(), run_dir=tmp_path))
    sink._first_row = 7  # as if six steps stood in the service
    assert list(sink.sent_steps()) == [1, 2, 3, 4, 5, 6]
    sink.event(EVENT, 6)
    for record in steps(6, 7, reward=0.5) if has_step else ():
        sink.step(record)
    sink.close(failed=True)
    rows = wandb_history(tmp_path / "wandb")
    assert [(step, row[REWARD], row["events/CheckpointSaved"]) for step, row in rows] == [
        (7, 0.5, 1)
    ] * has_step


@pytest.mark.parametrize("name", SinkName)
def test_steps_that_a_restart_undid_before_they_were_sent_never_come(tmp_path, name):
    for record in (*steps(1, 4, reward=0.25), *steps(3, 3, reward=0.5)):
        Journal(tmp_path).step(record)
    TrackedProcess(tmp_path, all_settings(tmp_path)[name]).close()
    assert shown(tmp_path, name, REWARD) == {1: 0.25, 2: 0.25, 3: 0.5}


def test_tensorboard_files_that_end_in_half_an_event_or_in_garbage_are_continued(tmp_path):
    settings = Sink(name=SinkName.TENSORBOARD)
    for number, harm in enumerate((lambda data: data[:-7], lambda data: data + b"\xff" * 64)):
        process = TrackedProcess(tmp_path, settings)
        process.put(*steps(number + 1, number + 1, reward=0.25))
        process.close()
        newest = max((tmp_path / "tensorboard").iterdir())
        newest.write_bytes(harm(newest.read_bytes()))
    process = TrackedProcess(tmp_path, settings)
    process.put(*steps(3, 3, reward=0.5))
    process.close()
    assert tensorboard_scalars(tmp_path / "tensorboard")[REWARD] == {1: 0.25, 2: 0.25, 3: 0.5}


def run_process(run_dir, settings, first, last, end):
    """A learner's process on this run, until its end."""
    command = [sys.executable, "-m", "tests.fixtures.tracked_process", str(run_dir)]
    command += [settings.model_dump_json(by_alias=True, exclude_none=True)]
    command += [str(first), str(last), end]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def all_settings(run_dir) -> dict[SinkName, Sink]:
    return {
        SinkName.TENSORBOARD: Sink(name=SinkName.TENSORBOARD),
        SinkName.WANDB: Sink(name=SinkName.WANDB, mode="offline"),
        SinkName.MLFLOW: mlflow_settings(run_dir),
    }


def shown(run_dir, name, scalar) -> dict[int, float]:
    """What a service shows under a name, by step."""
    match name:
        case SinkName.TENSORBOARD:
            return tensorboard_scalars(run_dir / "tensorboard")[scalar]
        case SinkName.WANDB:
            rows = wandb_history(run_dir / "wandb")
            return {step: row[scalar] for step, row in rows if scalar in row}
        case SinkName.MLFLOW:
            client = MlflowClient(tracking_uri=f"file://{run_dir / 'mlruns'}")
            (run,) = client.search_runs([client.get_experiment_by_name("demos").experiment_id])
            history = client.get_metric_history(run.info.run_id, scalar)
            # A kill between two numbers of a step has the first of them written again.
            points = {(point.step, point.value) for point in history}
            assert len({step for step, _ in points}) == len(points), "a step has two values"
            return dict(points)


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
    assert (run.data.params["model.name"], run.data.params["steps"]) == ("m", "30")


TOLD = make_sample(prompt="<|user|>2 + 2 =\n?", response="It is **4**", reward_parts={"right": 1.0})
PAGE = """\
| prompt | response | reward | parts | tokens | end |
| --- | --- | --- | --- | --- | --- |
| &lt;&#124;user&#124;&gt;2 + 2 =<br>? | It is &#42;&#42;4&#42;&#42; | 1 | right 1 | 2 | stop |
"""


def evaluate(settings: Sink, run_dir: Path) -> str:
    """Have a sink get a step and an evaluation with an answer; return the run's id there."""
    tracked = TrackedRun(run=make_run(), run_dir=run_dir)
    write_answers(run_dir, EVALUATION.step, [TOLD])
    sink = open_sink(settings, tracked)
    sink.step(step_of(2, 0.5))
    sink.evaluation(EVALUATION)
    sink.close(failed=False)
    return tracked.known_id(settings.name) or ""


def test_tensorboard_gets_answers_if_its_entry_says_so(tmp_path):
    evaluate(Sink(name=SinkName.TENSORBOARD, samples=True), tmp_path)
    assert tensorboard_texts(tmp_path / "tensorboard")["evaluation/samples"] == PAGE


def test_weights_and_biases_gets_answers_if_its_entry_says_so(tmp_path):
    evaluate(Sink(name=SinkName.WANDB, mode="offline", samples=True), tmp_path)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/evaluation/*.table.json")
    assert json.loads(table.read_text())["data"] == [
        ["<|user|>2 + 2 =\n?", "It is **4**", 1.0, "right 1", 2, "stop"]
    ]


def test_mlflow_gets_answers_if_its_entry_says_so(tmp_path):
    settings = mlflow_settings(tmp_path).model_copy(update={"samples": True})
    run_id = evaluate(settings, tmp_path)
    (page,) = tmp_path.glob(f"mlruns/*/{run_id}/artifacts/evaluation/samples/step-00000002.md")
    assert page.read_text() == PAGE


def test_without_that_word_no_text_leaves_the_machine(tmp_path):
    evaluate(Sink(name=SinkName.TENSORBOARD), tmp_path)
    assert set(tensorboard_texts(tmp_path / "tensorboard")) == {"run"}


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


def with_sinks(*sinks: Sink) -> VCPORun:
    run = make_run()
    spec = run.spec.model_copy(update={"tracking": Tracking(sinks=sinks)})
    return run.model_copy(update={"spec": spec})


def test_a_missing_package_is_named_with_its_field_and_the_extra(monkeypatch):
    monkeypatch.setitem(services._PACKAGES, SinkName.WANDB, "a_package_that_nobody_has")
    run = with_sinks(Sink(name="tensorboard"), Sink(name="wandb"))
    with pytest.raises(SpecError, match=r"sinks\[1\]\.name: needs the package a_package.*vcpo\[tr"):
        check_sinks(run)


OWN_SINK = """
class Own:
    def __init__(self, *, settings, tracked, folder): ...
    def sent_steps(self): return ()
    def step(self, record): ...
    def evaluation(self, record): ...
    def event(self, record, step): ...
    def close(self, *, failed): ...

class Half:
    def step(self, record): ...
"""


def test_own_classes_that_are_no_sinks_are_named_all_at_once(tmp_path, monkeypatch):
    (tmp_path / "own_sink.py").write_text(OWN_SINK)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sinks = [
        Sink(name="own_sink:Own", parameters={"folder": "here"}),
        Sink(name="own_sink:Half"),
        Sink(name="no_such_package:Own"),
        Sink(name="own_sink.more:Own"),
        Sink(name="own_sink:Own", parameters={"fodler": "here"}),
    ]
    found = list(services.sink_problems(with_sinks(*sinks[:4])))
    found += services.sink_problems(with_sinks(sinks[4]))
    lines = [str(problem) for problem in found]
    assert [line.partition(": ")[0] for line in lines] == [
        "spec.tracking.sinks[1].name",
        "spec.tracking.sinks[2].name",
        "spec.tracking.sinks[3].name",
        "spec.tracking.sinks[0].parameters",
    ]
    assert "is not a sink (it has no sent_steps and no evaluation and no event" in lines[0]
    assert "cannot be imported (ModuleNotFoundError: No module named 'no_such_package')" in lines[1]
    assert "in the learner image), and check the spelling" in lines[2]
    assert "the known parameters are folder" in lines[3]
