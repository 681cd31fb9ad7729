"""A sink may hang or fail; whoever hands it records neither waits nor sees it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection

import pytest

from tests.fixtures.records import STEP
from vcpo.api.tracking import SinkName
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.tracking.queued_sink import QueuedSink
from vcpo.tracking.tracker import Tracker

PATIENCE_S = 30.0
EVALUATION = EvaluationRecord(
    step=3, time_unix_s=0.0, accuracy=0.5, num_trajectories=4, policy_version_min=2,
    policy_version_max=3,
)  # fmt: skip
EVENT = EventRecord(time_unix_s=0.0, source="learner", kind="Draining", message="SIGTERM")


class ListSink:
    """Remembers what it gets; a test may hold it up or make it fail."""

    def __init__(self) -> None:
        self.got: list[object] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.was_called = threading.Event()
        self.error: Exception | None = None
        self.sent: Collection[int] = ()
        self.cannot_say: Exception | None = None

    def sent_steps(self):
        if self.cannot_say is not None:
            raise self.cannot_say
        return self.sent

    def step(self, record):
        self._take(record.step)

    def evaluation(self, record):
        self._take(("evaluation", record.step))

    def event(self, record, step):
        self._take((record.kind, step))

    def close(self, *, failed):
        self._take(("closed", failed))

    def _take(self, what):
        self.was_called.set()
        self.may_go_on.wait()
        if self.error is not None:
            raise self.error
        self.got.append(what)


def step(number):
    return dataclasses.replace(STEP, step=number)


def close(queued, *, failed=False):
    queued.start_closing(failed=failed)
    return queued.join(PATIENCE_S)


@pytest.fixture
def sink():
    made = ListSink()
    yield made
    made.may_go_on.set()


def test_a_sink_gets_everything_in_order_and_is_closed(sink):
    queued = QueuedSink(SinkName.WANDB, lambda: sink)
    for record in (EVENT, step(1), EVENT, EVALUATION, step(2)):
        queued.put(record)
    assert close(queued, failed=True)
    expected = [("Draining", 0), 1, ("Draining", 1), ("evaluation", 3), 2, ("closed", True)]
    assert (sink.got, queued.dropped) == (expected, 0)


def test_a_sink_that_hangs_for_ever_takes_no_step_s_time_and_costs_only_what_does_not_fit(sink):
    sink.may_go_on.clear()
    queued = QueuedSink(SinkName.WANDB, lambda: sink, capacity=3)
    queued.put(step(1))
    assert sink.was_called.wait(PATIENCE_S)  # step 1 is held by the sink now
    for number in range(2, 12):
        queued.put(step(number))  # would never return if it waited
    assert queued.dropped == 7  # of 10, three wait
    queued.start_closing(failed=False)
    assert not queued.join(0.0)
    assert queued.dropped == 10


def test_a_full_queue_does_not_hide_the_end(sink):
    sink.may_go_on.clear()
    queued = QueuedSink(SinkName.WANDB, lambda: sink, capacity=1)
    queued.put(step(1))
    assert sink.was_called.wait(PATIENCE_S)
    queued.put(step(2))
    queued.start_closing(failed=False)
    sink.may_go_on.set()
    assert queued.join(PATIENCE_S)
    assert sink.got == [1, 2, ("closed", False)]


def test_a_sink_that_fails_is_reported_once_with_the_cause_and_gets_later_records(sink, caplog):
    sink.error = RuntimeError("503 from the server")
    queued = QueuedSink(SinkName.MLFLOW, lambda: sink)
    queued.put(step(1))
    queued.put(step(2))
    assert close(queued)
    failing = [record for record in caplog.records if "fails" in record.getMessage()]
    assert len(failing) == 1
    assert "sink mlflow fails: 503 from the server" in failing[0].getMessage()
    assert queued.dropped == 2


def test_a_sink_that_cannot_be_opened_costs_its_numbers_only(caplog):
    def refuse():
        raise ConnectionError("no API key")

    queued = QueuedSink(SinkName.WANDB, refuse)
    queued.put(step(1))
    assert close(queued)
    assert queued.dropped == 1
    assert "sink wandb cannot be opened: no API key" in caplog.text


def test_what_comes_after_the_end_is_dropped(sink):
    queued = QueuedSink(SinkName.WANDB, lambda: sink)
    assert close(queued)
    queued.put(step(1))
    assert queued.dropped == 1


HISTORY = [(EVENT, 0), (step(1), 1), (EVENT, 1), (step(2), 2), (EVENT, 2), (step(3), 3), (EVENT, 3)]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ((), [("Draining", 0), 1, ("Draining", 1), 2, ("Draining", 2), 3, ("Draining", 3)]),
        ((1,), [("Draining", 1), 2, ("Draining", 2), 3, ("Draining", 3)]),
        ((1, 3), [("Draining", 1), 2, ("Draining", 2), ("Draining", 3)]),
        ((1, 2, 3), [("Draining", 3)]),
        ((1, 2, 3, 4, 5), [("Draining", 3)]),
    ],
)
def test_a_sink_first_gets_the_steps_that_it_lacks_and_the_events_since_its_last_whole_one(
    sink, sent, expected
):
    sink.sent = sent
    queued = QueuedSink(SinkName.WANDB, lambda: sink, history=HISTORY)
    queued.put(EVENT)
    queued.put(step(4))
    assert close(queued)
    assert sink.got == [*expected, ("Draining", 3), 4, ("closed", False)]


def test_a_sink_that_fails_to_say_what_it_has_gets_the_whole_history(sink, caplog):
    sink.cannot_say = ConnectionError("404")
    queued = QueuedSink(SinkName.WANDB, lambda: sink, history=HISTORY)
    assert close(queued)
    assert [each for each in sink.got if isinstance(each, int)] == [1, 2, 3]
    assert "sink wandb cannot say which steps it has: 404" in caplog.text


def test_a_tracker_hands_every_record_to_each_sink(sink):
    tracker, other = Tracker(), ListSink()
    tracker.feed([QueuedSink(SinkName.WANDB, lambda: sink),
                  QueuedSink(SinkName.MLFLOW, lambda: other)])  # fmt: skip
    tracker.put(step(1))
    tracker.close(failed=False, timeout_s=PATIENCE_S)
    assert sink.got == other.got == [1, ("closed", False)]


def test_a_tracker_waits_for_all_sinks_together_no_longer_than_it_may(sink, caplog):
    sink.may_go_on.clear()
    tracker, other = Tracker(), ListSink()
    tracker.feed([QueuedSink(SinkName.WANDB, lambda: sink),
                  QueuedSink(SinkName.MLFLOW, lambda: other)])  # fmt: skip
    tracker.put(step(1))
    assert sink.was_called.wait(PATIENCE_S)
    tracker.put(step(2))
    tracker.close(failed=False, timeout_s=0.0)
    assert "sink wandb did not get 1 records" in caplog.text
    assert "`vcpo export RUN --to wandb`" in caplog.text


def test_a_run_without_sinks_tracks_nothing():
    tracker = Tracker()
    tracker.feed([])
    tracker.put(step(1))
    tracker.close(failed=False, timeout_s=PATIENCE_S)
    assert tracker.dropped == {}
