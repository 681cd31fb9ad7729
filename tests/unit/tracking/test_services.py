"""The real clients of the services, and what is in their files afterwards."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.records import STEP, make_sample
from tests.fixtures.tracking import tensorboard_scalars, tensorboard_texts, wandb_history, wandb_ids
from vcpo.api import SpecError, VCPORun
from vcpo.api.tracking import Sink, SinkName, Tracking
from vcpo.records.journal import EvaluationRecord, EventRecord, Journal
from vcpo.records.samples import write_answers
from vcpo.records.step_record import StepRecord
from vcpo.tracking.follow import follow
from vcpo.tracking.sink import _PACKAGES, TrackedRun, check_sinks, open_sink, sink_problems

REWARD = "task/reward_mean"


EVALUATION = EvaluationRecord(
    step=2, time_unix_s=1002.5, accuracy=0.25, num_prompts=4, num_trajectories=4,
    policy_version_min=2, policy_version_max=2,
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


def step_of(step: int, reward: float) -> StepRecord:
    return dataclasses.replace(STEP, step=step, reward_mean=reward, time_unix_s=1000.0 + step)


def steps(first, last, *, reward):
    return [step_of(step, reward) for step in range(first, last + 1)]


def send(settings: Sink, run_dir: Path) -> None:
    """Send what a service lacks of the records."""
    tracked = TrackedRun(run=make_run(), run_dir=run_dir)
    follow(run_dir, lambda: open_sink(settings, tracked), lambda _: True)


def train_fall_back_and_train(settings: Sink, run_dir: Path) -> None:
    """Five steps with reward 0.25; a restart from the checkpoint of step 3; steps 4 to 7 at 0.5."""
    journal = Journal(run_dir)
    for record in steps(1, 5, reward=0.25):
        journal.step(record)
    journal.event(EVENT)
    journal.evaluation(EVALUATION)
    send(settings, run_dir)
    tracked = TrackedRun(run=make_run(), run_dir=run_dir)

    def wait(_: float) -> bool:
        for record in steps(4, 7, reward=0.5):
            journal.step(record)
        return True

    follow(run_dir, lambda: open_sink(settings, tracked), wait)


FIRST_TIME_KEPT = {**dict.fromkeys(range(1, 6), 0.25), 6: 0.5, 7: 0.5}
"""Rewards by step of a service that cannot take back what it was sent."""
NEWEST_KEPT = {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.5}


def test_tensorboard_shows_the_newest_history(tmp_path):
    train_fall_back_and_train(Sink(name=SinkName.TENSORBOARD), tmp_path)
    points = tensorboard_scalars(tmp_path / "tensorboard")
    assert points[REWARD] == NEWEST_KEPT
    assert points["evaluation/evaluation_accuracy"] == {2: 0.25}
    assert tensorboard_texts(tmp_path / "tensorboard")["events/CheckpointSaved"] == "step 1"


def test_steps_that_were_taken_again_before_tensorboard_was_opened_are_the_new_ones(tmp_path):
    settings, journal = Sink(name=SinkName.TENSORBOARD), Journal(tmp_path)
    for record in steps(1, 4, reward=0.25):
        journal.step(record)
    send(settings, tmp_path)
    for record in steps(2, 3, reward=0.5):
        journal.step(dataclasses.replace(record, time_unix_s=900.0))  # of a clock set back
    send(settings, tmp_path)
    shown = tensorboard_scalars(tmp_path / "tensorboard")[REWARD]
    assert shown == {1: 0.25, 2: 0.5, 3: 0.5}


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


@pytest.mark.parametrize("has_step", [True, False])
def test_what_comes_before_the_first_step_of_a_resumed_service_makes_no_row_of_its_own(
    tmp_path, has_step
):
    # A row with a mark alone would be taken for a step that the service has.
    settings = Sink(name=SinkName.WANDB, mode="offline")
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


TOLD = make_sample(prompt="<|user|>2 + 2 =\n?", response="It is **4**", reward_parts={"right": 1.0})
PAGE = """\
| prompt | response | reward | parts | tokens | end |
| --- | --- | --- | --- | --- | --- |
| &lt;&#124;user&#124;&gt;2 + 2 =<br>? | It is &#42;&#42;4&#42;&#42; | 1 | right 1 | 2 | stop |
"""


def evaluate(settings: Sink, run_dir: Path) -> None:
    """Have a sink get a step and an evaluation with an answer."""
    tracked = TrackedRun(run=make_run(), run_dir=run_dir)
    write_answers(run_dir, EVALUATION.step, [TOLD])
    sink = open_sink(settings, tracked)
    sink.step(step_of(2, 0.5))
    sink.evaluation(EVALUATION)
    sink.close(failed=False)


def test_tensorboard_gets_answers_if_its_entry_says_so(tmp_path):
    evaluate(Sink(name=SinkName.TENSORBOARD, samples=True), tmp_path)
    assert tensorboard_texts(tmp_path / "tensorboard")["evaluation/samples"] == PAGE


def test_weights_and_biases_gets_answers_if_its_entry_says_so(tmp_path):
    evaluate(Sink(name=SinkName.WANDB, mode="offline", samples=True), tmp_path)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/evaluation/*.table.json")
    assert json.loads(table.read_text())["data"] == [
        ["<|user|>2 + 2 =\n?", "It is **4**", 1.0, "right 1", 2, "stop"]
    ]


def test_without_that_word_no_text_leaves_the_machine(tmp_path):
    evaluate(Sink(name=SinkName.TENSORBOARD), tmp_path)
    assert set(tensorboard_texts(tmp_path / "tensorboard")) == {"run"}


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
    monkeypatch.setitem(_PACKAGES, SinkName.WANDB, "a_package_that_nobody_has")
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
    found = list(sink_problems(with_sinks(*sinks[:4])))
    found += sink_problems(with_sinks(sinks[4]))
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
