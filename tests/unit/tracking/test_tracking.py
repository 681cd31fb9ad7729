"""The numbers that tracking services get."""

import dataclasses
import logging
import signal
import subprocess
import sys
import time

import pytest

from tests.fixtures.disk_limits import limit_file_size
from tests.fixtures.records import EVALUATION, STEP
from tests.fixtures.tracking import tensorboard_scalars
from vcpo.api import parse_run
from vcpo.records.journal import EventRecord, Journal, read_events
from vcpo.tracking.follow import RecordTail, follow, missing_records
from vcpo.tracking.sink import LAST_NAME, TrackedRun, open_sink, step_scalars

WEIGHED = dataclasses.replace(
    STEP,
    ess_ratio=0.4,
    on_policy_ess_ratio=0.8,
    learning_rate_scale=0.5,
    diagnostics={"token_ess_ratio": 0.75},
    mismatch={"gap_nats": 0.01, "cause": "it is late", "by_engine": {"hf": 0.02}},
)


def test_every_number_of_a_step_is_sent_under_the_name_of_its_field():
    numbers = {
        each.name
        for each in dataclasses.fields(WEIGHED)
        if isinstance(getattr(WEIGHED, each.name), int | float) and each.name != "time_unix_s"
    }
    sent = step_scalars(WEIGHED)
    assert numbers <= {name.partition("/")[2] for name in sent}
    assert {name.partition("/")[0] for name in sent} == {"task", "learner", "off_policy", "rollout"}
    assert list(sent)[-1] == LAST_NAME


def test_numbers_within_a_field_are_sent_and_words_are_not():
    sent = step_scalars(dataclasses.replace(WEIGHED, dropped={"stale": 3}))
    assert sent["off_policy/mismatch/by_engine/hf"] == 0.02
    assert sent["off_policy/diagnostics/token_ess_ratio"] == 0.75
    assert sent["rollout/dropped/stale"] == 3
    assert "off_policy/mismatch/cause" not in sent


def test_the_ess_is_sent_also_relative_to_that_of_on_policy_data():
    sent = step_scalars(WEIGHED)
    assert sent["off_policy/relative_ess_ratio"] == pytest.approx(0.5)
    assert sent["off_policy/ess_ratio"] == 0.4


def test_a_skipped_step_has_no_learning_rate_and_one_without_weights_no_ess():
    skipped = step_scalars(dataclasses.replace(WEIGHED, skipped="no_gradient"))
    assert "off_policy/learning_rate_scale" not in skipped
    assert skipped[LAST_NAME] == 1.0
    weightless = step_scalars(dataclasses.replace(WEIGHED, ess_ratio=0.0))
    assert {"off_policy/ess_ratio", "off_policy/relative_ess_ratio"}.isdisjoint(weightless)


PATIENCE_S = 60.0
RUN = """
metadata: {name: demo}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 30
  tracking: {sinks: [{name: tensorboard}]}
"""


def step(number, **changes):
    return dataclasses.replace(STEP, step=number, time_unix_s=1000.0 + number, **changes)


def event(time_s=1000.0, kind="Draining"):
    return EventRecord(time_unix_s=time_s, source="learner", kind=kind, message="SIGTERM")


class ListSink:
    """Remembers what it gets; a test may make it fail once."""

    def __init__(self, sent=(), fails_at=None):
        self.got = []
        self.sent = sent
        self.fails_at = fails_at

    def sent_steps(self):
        return self.sent

    def step(self, record):
        if record.step == self.fails_at:
            raise RuntimeError("503 from the server")
        self.got.append(record.step)

    def evaluation(self, record):
        self.got.append(("evaluation", record.step))

    def event(self, record, step):
        self.got.append((record.kind, step))

    def close(self, *, failed):
        self.got.append(("closed", failed))


def script(*actions):
    """A wait that does an action each time; with the last one the learner has ended."""
    left = list(actions)

    def wait(_: float) -> bool:
        left.pop(0)()
        return not left

    return wait


def test_a_service_gets_everything_in_order_and_is_closed(tmp_path):
    sink, journal = ListSink(), Journal(tmp_path)
    journal.event(event())
    journal.step(step(1))

    def more():
        journal.evaluation(dataclasses.replace(EVALUATION, step=1, time_unix_s=1001.5))
        journal.step(step(2))

    def end():
        journal.event(event(1003.0, kind="Failed"))

    follow(tmp_path, lambda: sink, script(more, end))
    expected = [("Draining", 0), 1, ("evaluation", 1), 2, ("Failed", 2), ("closed", True)]
    assert sink.got == expected


def test_a_service_that_fails_is_told_once_opened_anew_and_gets_what_it_lacks(tmp_path):
    journal = Journal(tmp_path)
    for number in (1, 2, 3):
        journal.step(step(number))
    sinks = [ListSink(fails_at=2), ListSink(fails_at=2, sent=(1,)), ListSink(sent=(1,))]
    opened = iter(sinks)
    follow(tmp_path, lambda: next(opened), script(*[lambda: None] * 3), name="own:Sink")
    rest = [2, 3, ("TrackingFailed", 3), ("closed", False)]
    assert [sink.got for sink in sinks] == [[1], [], rest]
    (told,) = read_events(tmp_path)
    assert told.level == logging.WARNING
    assert told.message == (
        "own:Sink did not take the run's records (RuntimeError: 503 from the server); they are"
        " sent when it does, or by `vcpo export --to`"
    )


def test_records_come_in_order_without_undone_history(tmp_path):
    journal = Journal(tmp_path)
    for number in (1, 2, 3, 4, 3):
        journal.step(step(number))
    journal.event(event(1002.5))
    tail = RecordTail(tmp_path)
    assert [(type(record).__name__, at) for record, at in tail.read()] == [
        ("StepRecord", 1),
        ("StepRecord", 2),
        ("EventRecord", 2),
        ("StepRecord", 3),
    ]
    journal.event(event())
    assert [at for _, at in tail.read()] == [3]


HISTORY = [
    (event(), 0), (step(1), 1), (event(), 1), (step(2), 2), (event(), 2), (step(3), 3), (event(), 3)
]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ((), ["Draining", 1, "Draining", 2, "Draining", 3, "Draining"]),
        ((1,), ["Draining", 2, "Draining", 3, "Draining"]),
        ((1, 3), ["Draining", 2, "Draining", "Draining"]),
        ((1, 2, 3), ["Draining"]),
        ((1, 2, 3, 4, 5), ["Draining"]),
    ],
)
def test_a_sink_lacks_steps_and_the_events_since_its_last_whole_one(sent, expected):
    found = [getattr(record, "step", "Draining") for record, _ in missing_records(HISTORY, sent)]
    assert found == expected


def test_every_step_of_the_journal_is_in_the_service_after_a_kill(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    journal = Journal(tmp_path)

    def start():
        command = [sys.executable, "-m", "vcpo.tracking.follow", str(tmp_path / "run.yaml")]
        return subprocess.Popen([*command, str(tmp_path), "0"], stdin=subprocess.PIPE)

    for number in range(1, 17):
        journal.step(step(number, reward_mean=number / 64))
    died = start()
    mark = tmp_path / "tracking" / "tensorboard.id"
    wait_until(lambda: mark.exists() and int(mark.read_text().split()[0]) >= 8)
    died.send_signal(signal.SIGKILL)
    died.communicate()
    follower = start()
    wait_until(lambda: mark.read_text().split()[0] == "16")
    for number in range(17, 25):
        journal.step(step(number, reward_mean=number / 64))
    follower.communicate()  # ends its input, as the end of a learner does
    assert follower.returncode == 0
    shown = tensorboard_scalars(tmp_path / "tensorboard")["task/reward_mean"]
    assert shown == {number: number / 64 for number in range(1, 25)}


def test_a_disk_that_is_full_for_a_while_costs_the_service_no_step(tmp_path, caplog):
    journal, tracked = Journal(tmp_path), TrackedRun(run=parse_run(RUN), run_dir=tmp_path)
    settings = tracked.run.spec.tracking.sinks[0]
    journal.step(step(1, reward_mean=1 / 64))

    def train():
        for number in range(2, 31):
            journal.event(
                dataclasses.replace(event(1000.0 + number), message="x" * 8192)
            )  # fills a buffer
            journal.step(step(number, reward_mean=number / 64))
        before.append(limit_file_size(1 << 11))

    before = []
    waits = script(train, lambda: limit_file_size(before[0]), lambda: None)
    follow(tmp_path, lambda: open_sink(settings, tracked), waits)
    assert "File too large" in caplog.text
    shown = tensorboard_scalars(tmp_path / "tensorboard")["task/reward_mean"]
    assert shown == {number: number / 64 for number in range(1, 31)}


def wait_until(holds) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
