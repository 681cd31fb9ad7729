"""The learner's events that reach the screen."""

from __future__ import annotations

import pytest

from vcpo.local.terminal.run_view import EventFeed, is_shown
from vcpo.records.journal import EventRecord, EventTail, Journal


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


def test_every_throttle_is_shown(feed, journal):
    for number in range(5):
        journal.event(event(f"number {number}", kind="Throttled"))
    assert feed.new_lines() == [f"Throttled: number {number}" for number in range(5)]


def test_repeated_events_are_counted_rather_than_shown(feed, journal):
    for number in range(1, 13):
        journal.event(event(f"step {number}"))
    assert feed.new_lines() == [
        "StepSkipped: step 1",
        "StepSkipped: step 2",
        "StepSkipped: step 3",
        "StepSkipped: step 10 (10 of these so far)",
    ]


def test_a_kind_that_is_rare_is_shown_beside_one_that_is_not(feed, journal):
    for number in range(50):
        journal.event(event(f"step {number}"))
    feed.new_lines()
    journal.event(event("dead", kind="CollapseWarning"))
    assert feed.new_lines() == ["CollapseWarning: dead"]


def test_the_first_three_and_every_power_of_ten_are_worth_showing():
    shown = [number for number in range(1, 100_001) if is_shown(number)]
    assert shown == [1, 2, 3, 10, 100, 1000, 10_000, 100_000]
