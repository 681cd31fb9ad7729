"""Failures are told apart by what failed where; the first is worth a line, and every hundredth."""

from __future__ import annotations

import pytest

from vcpo.wire.failures import (
    MAX_DISTINCT,
    Failure,
    FailureCause,
    FailureCounts,
    failure_from_message,
    failure_to_message,
    one_line,
)
from vcpo.wire.v1 import work_pb2


def failure(message="no item 7", *, cause=FailureCause.REWARD, line=12):
    return Failure(
        cause=cause, exception_type="KeyError", message=message, location=f"/app/task.py:{line}"
    )


def test_a_failure_is_said_in_one_line():
    assert failure().sentence == "reward: KeyError: no item 7 (/app/task.py:12)"
    wrong = Failure(cause=FailureCause.TYPE, message="must return a number, got None")
    assert wrong.sentence == "type: must return a number, got None"


def test_the_first_and_every_hundredth_of_the_same_are_worth_a_line():
    counts = FailureCounts()
    lines = [counts.add(failure(f"no item {number}")) for number in range(1, 251)]
    assert [(number, line) for number, line in enumerate(lines, start=1) if line] == [
        (1, "reward: KeyError: no item 1 (/app/task.py:12)"),
        (100, "reward: KeyError: no item 100 (/app/task.py:12); 100 times so far"),
        (200, "reward: KeyError: no item 200 (/app/task.py:12); 200 times so far"),
    ]


def test_another_line_of_code_or_cause_is_another_failure():
    counts = FailureCounts()
    others = [failure(), failure(line=13), failure(cause=FailureCause.PROMPT)]
    assert all(counts.add(other, now_s=at) for at, other in enumerate(others))
    assert [one.latest for one in counts] == others[::-1]


def test_no_more_than_a_few_distinct_failures_are_kept():
    counts = FailureCounts()
    lines = [counts.add(failure(line=line)) for line in range(1000)]
    assert len(list(counts)) == MAX_DISTINCT
    assert lines[MAX_DISTINCT:] == [None] * (1000 - MAX_DISTINCT)


@pytest.mark.parametrize("cause", FailureCause)
def test_a_failure_travels_whole(cause):
    sent = failure(cause=cause)
    assert failure_from_message(failure_to_message(sent)) == sent


def test_a_message_without_a_cause_is_an_unknown_failure():
    message = work_pb2.Failure(kind=work_pb2.FAILURE_KIND_ENVIRONMENT, message="from before")
    assert failure_from_message(message).sentence == "unknown: from before"


def test_a_long_text_from_the_wire_is_truncated_to_one_short_line():
    message = work_pb2.Failure(message="a\n" * 10_000, location="b" * 10_000)
    read = failure_from_message(message)
    assert (len(read.message), len(read.location)) == (500, 500)
    assert "\n" not in read.message
    assert one_line(" a \n\t b ") == "a b"
