"""What a stranger's bit can do to a journal: it costs the records of its line, and no other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.records import EVALUATION, STEP
from vcpo.records.journal import (
    EVENTS_FILE,
    JOURNAL_DAMAGED,
    METRICS_FILE,
    EventRecord,
    EventTail,
    Journal,
    read_events,
    read_metrics,
)

# One flipped bit makes 11 of 15, which would undo what is before, and 9.5 of 1.5.
STEPS = (replace(STEP, step=11), replace(STEP, step=15, reward_mean=1.5))
EVALUATED = replace(EVALUATION, step=11)
EVENTS = tuple(
    EventRecord(time_unix_s=1000.0 + number, source="learner", kind="Kind", message=f"{number} ü")
    for number in range(2)
)


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield a byte's offset, and the data with a bit of it flipped.

    Each byte gives the bit whose turn it is, and all that begin or end a line: a checksum finds any
    one bit alike, and lines are found before it is computed.
    """
    for offset, byte in enumerate(data):
        for bit in range(8):
            other = byte ^ 1 << bit
            if bit == offset % 8 or ord("\n") in (byte, other):
                yield offset, data[:offset] + bytes([other]) + data[offset + 1 :]


def hit_lines(data: bytes, offset: int) -> set[int]:
    """Return the numbers, from 0, of the lines that a byte belongs to: two for a line's end."""
    number = data[:offset].count(b"\n")
    return {number, number + 1} if data[offset : offset + 1] == b"\n" else {number}


def without(records, lines: set[int]) -> tuple:
    return tuple(each for number, each in enumerate(records) if number not in lines)


@pytest.fixture
def metrics_file(tmp_path) -> Path:
    journal = Journal(tmp_path)
    journal.step(STEPS[0])
    journal.evaluation(EVALUATED)
    journal.step(STEPS[1])
    return tmp_path / METRICS_FILE


@pytest.fixture
def events_file(tmp_path) -> Path:
    for event in EVENTS:
        Journal(tmp_path).event(event)
    return tmp_path / EVENTS_FILE


def test_a_flipped_bit_costs_the_records_of_its_line_and_no_other(metrics_file):
    data = metrics_file.read_bytes()
    records = (STEPS[0], EVALUATED, STEPS[1])
    for offset, flipped in flips(data):
        metrics_file.write_bytes(flipped)
        metrics, lines = read_metrics(metrics_file.parent), hit_lines(data, offset)
        found = sorted((*metrics.steps, *metrics.evaluations), key=records.index)
        assert tuple(found) in [without(records, lines), records], f"byte {offset}"
        assert len(metrics.damaged) <= 2
        assert {each.number - 1 for each in metrics.damaged} <= {*lines, min(lines) + 1}


def test_a_flipped_bit_costs_the_events_of_its_line_and_no_other(events_file):
    data = events_file.read_bytes()
    for offset, flipped in flips(data):
        events_file.write_bytes(flipped)
        lines = hit_lines(data, offset)
        events = read_events(events_file.parent)
        found = tuple(event for event in events if event.kind != JOURNAL_DAMAGED)
        assert found in [without(EVENTS, lines), EVENTS], f"byte {offset}"
        assert len(events) - len(found) <= 2


STRANGE = [
    b"null",
    b"[1]",
    b"3",
    b'"text"',
    b"\xff\xfe\x00",
    b"",
    b"{",
    b"[" * 100_000,
    b"9" * 5000,
    b'{"type":"step","step":NaN}',
    b'{"type":"step","step":1e999}',
    b'{"type":"something else"}',
    b'{"type":"step"}',
    json.dumps({"type": "evaluation", "step": "x", "accuracy": None}).encode(),
    b'null,"crc32":"e1e5a5f1"}',
]


@pytest.mark.parametrize("line", STRANGE, ids=lambda line: repr(line[:20]))
def test_a_line_that_no_journal_wrote_is_skipped_and_named(metrics_file, events_file, line):
    for path in (metrics_file, events_file):
        whole = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([whole[0], line, b"\n", *whole[1:]]))
    metrics = read_metrics(metrics_file.parent)
    assert (metrics.steps, metrics.evaluations) == (STEPS, (EVALUATED,))
    (damaged,) = metrics.damaged
    assert damaged.notice.startswith("metrics.jsonl line 2: ")
    events = read_events(events_file.parent)
    assert tuple(each for each in events if each.kind != JOURNAL_DAMAGED) == EVENTS
    assert events[1].kind == JOURNAL_DAMAGED
    assert events[1].message.startswith("events.jsonl line 2: ")
    assert events[1].time_unix_s == EVENTS[0].time_unix_s


def test_a_record_of_a_version_with_other_fields_is_named_with_them(tmp_path):
    journal = Journal(tmp_path)
    entry = {**dataclasses.asdict(STEP), "colour": "red"}
    del entry["workers"]
    journal._append(METRICS_FILE, {"type": "step", **entry})
    journal._append(METRICS_FILE, {"type": "holiday"})
    journal._append(METRICS_FILE, {"type": ["step"]})
    causes = [each.notice for each in read_metrics(tmp_path).damaged]
    assert "whose fields differ (colour, workers)" in causes[0]
    assert causes[1].startswith("metrics.jsonl line 2: no record has the type 'holiday'")
    assert len(causes) == 3


def test_a_follower_names_a_damaged_line_by_its_number_in_the_file(events_file):
    tail = EventTail(events_file.parent)
    with events_file.open("ab") as file:
        file.write(b"null\n")
    Journal(events_file.parent).event(EVENTS[0])
    named, event = tail.read()
    assert named.message.startswith("events.jsonl line 3: ")
    assert event == EVENTS[0]
    assert tail.read() == []
