"""The screen's view of the learner's signals."""

from __future__ import annotations

import pytest

from tests.fixtures.signals import signals_message
from vcpo.api import parse_run
from vcpo.learner_control import run_signals
from vcpo.local.terminal.run_view import EventFeed, RunView, run_view
from vcpo.records.journal import EventRecord, EventTail, Journal
from vcpo.wire.v1 import control_pb2, work_pb2

RUN = parse_run("""
metadata: {name: r}
spec: {model: {name: m}, environment: {name: countdown}, steps: 300}
""")


def view_of(
    signals: control_pb2.Signals | None, *, serves: bool = True, age_s: float = 4.0
) -> RunView:
    return run_view(
        RUN,
        None if signals is None else run_signals(signals).at_age(age_s),
        learner_serves=serves,
        workers_desired=1,
        elapsed_s=9.0,
    )


def signals(**fields) -> control_pb2.Signals:
    return signals_message(phase=work_pb2.RUN_PHASE_RUNNING, **{"step": 20, **fields})


def test_before_the_first_signals_a_run_starts():
    view = view_of(None, serves=False)
    assert (view.phase, view.signals.step, view.signals.warning_level) == ("starting", 0, None)
    assert view.signals.lag_limit_steps == view.max_policy_lag_steps


def test_a_run_whose_learner_is_away_is_not_shown_as_running():
    assert view_of(signals()).phase == "running"
    away = view_of(signals(), serves=False)
    assert (away.phase, away.signals.step, away.signals.age_s) == ("restarting", 20, 4.0)


def test_a_run_whose_learner_does_not_answer_is_not_shown_as_running():
    assert [view_of(signals(), age_s=age_s).phase for age_s in (9.9, 10.0)] == ["running", "silent"]


def test_the_end_is_estimated_from_the_batches_of_late():
    view = view_of(signals(consumed_per_s=8.0))
    assert view.eta_s == (300 - 20) * 16 / 8.0
    assert view_of(signals()).eta_s is None


def event(message: str, *, kind: str = "StepSkipped", source: str = "learner") -> EventRecord:
    return EventRecord(time_unix_s=1.0, source=source, kind=kind, message=message)


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path)


@pytest.fixture
def feed(journal, tmp_path) -> EventFeed:
    journal.event(event("of an earlier run"))
    return EventFeed(EventTail(tmp_path), own_source="host")


def test_new_events_are_shown_once(feed, journal):
    assert feed.new_lines() == []
    journal.event(event("one"))
    journal.event(event("low", kind="CollapseWarning"))
    assert feed.new_lines() == ["StepSkipped: one", "CollapseWarning: low"]
    assert feed.new_lines() == []


def test_what_the_host_wrote_itself_is_not_shown_again(feed, journal):
    journal.event(event("mine", source="host"))
    assert feed.new_lines() == []


def test_repeated_events_are_counted_rather_than_shown(feed, journal):
    for number in range(1, 13):
        journal.event(event(f"step {number}"))
    assert feed.new_lines() == [
        "StepSkipped: step 1",
        "StepSkipped: step 2",
        "StepSkipped: step 3",
        "StepSkipped: step 10 (10 of these so far)",
    ]
