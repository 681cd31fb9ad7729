"""Whose fault failures are, from the outcomes of each worker."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.control.faulty_workers import (
    WorkerOutcomes,
    is_at_fault,
    is_run_at_fault,
    is_suspect,
    max_groups,
)

NEW = WorkerOutcomes()
LIMIT = 4
"""Failures in a row that are allowed; so 2 make a worker suspect."""


def failed(times, outcomes=NEW, *, at_s=10.0, granted_s=-math.inf, others=()):
    for _ in range(times):
        outcomes = outcomes.after_failure(at_s, granted_s=granted_s, others=others)
    return outcomes


def works(at_s=20.0):
    return NEW.after_success(at_s)


def test_a_worker_is_suspect_after_half_of_the_failures_that_are_allowed():
    assert [is_suspect(failed(times), LIMIT) for times in (1, 2, 3)] == [False, True, True]
    assert [is_suspect(failed(times), 5) for times in (2, 3)] == [False, True]
    assert is_suspect(failed(1), 1)


def test_a_success_clears_a_worker():
    outcomes = failed(3).after_success(20.0)
    assert outcomes == WorkerOutcomes(last_success_s=20.0, recent=(False, False, False, True))
    assert not is_suspect(outcomes, LIMIT)


def test_only_failures_of_leases_that_others_could_do_are_held_against_a_worker():
    began = failed(3, at_s=10.0).after_success_of(works(20.0))
    before = failed(2, began, granted_s=19.0, others=[works(30.0)])
    assert not is_at_fault(before, LIMIT)
    after = failed(2, began, granted_s=20.0, others=[works(30.0)])
    assert is_at_fault(after, LIMIT)
    assert (after.in_a_row, after.against_others) == (5, 2)


def test_what_others_delivered_before_a_worker_began_to_fail_proves_nothing():
    began = failed(1, at_s=10.0).after_success_of(works(9.0))
    assert failed(5, began, granted_s=50.0, others=[works(9.0)]).against_others == 0


@pytest.mark.parametrize(
    ("recent", "speaks"),
    [((True,), True), ((True, False), True), ((True, False, False), False), ((False,) * 8, False)],
)
def test_a_worker_that_mostly_fails_speaks_against_no_other(recent, speaks):
    other = WorkerOutcomes(last_success_s=20.0, recent=recent)
    assert failed(1, at_s=10.0).is_outdone_by(other) == speaks


def test_a_suspect_waits_for_the_others_then_tries_one_group_at_a_time():
    suspect = failed(2)
    assert max_groups(failed(1), [], [NEW], LIMIT) is None
    assert max_groups(suspect, [NEW], [NEW], LIMIT) == 0
    assert max_groups(suspect, [works(20.0)], [works(20.0)], LIMIT) == 1
    assert max_groups(suspect, [works(20.0)], [], LIMIT) == 1


def test_when_nobody_else_may_deliver_a_suspect_goes_on():
    assert max_groups(failed(2), [], [], LIMIT) is None
    assert max_groups(failed(2), [failed(2)], [failed(2)], LIMIT) is None


@pytest.mark.parametrize(
    ("failures", "at_work", "ends"),
    [
        ({"a": 4}, ["a"], True),
        ({"a": 3}, ["a"], False),
        ({"a": 400}, ["a", "b"], False),  # b may still deliver
        ({"a": 400, "b": 1}, ["a", "b"], False),  # 2 + 1 of 4
        ({"a": 400, "b": 2}, ["a", "b"], True),
        ({"a": 400, "b": 2}, [], True),  # both are gone
        ({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, list("abcde"), True),
        ({"a": 9, "b": 9, "c": 9, "d": 9, "e": 9}, list("abcdef"), False),
    ],
)
def test_the_run_ends_when_all_workers_share_its_failures(failures, at_work, ends):
    assert is_run_at_fault(failures, at_work, LIMIT) == ends


@given(
    failures=st.dictionaries(st.integers(0, 20), st.integers(1, 1000)),
    limit=st.integers(1, 1000),
    extra=st.integers(0, 1000),
)
def test_one_workers_failures_never_count_for_another(failures, limit, extra):
    names = list(failures)
    if len(names) >= 2 and not is_run_at_fault(failures, names, limit):
        # The most that fails alone may add is its share, and it has that already.
        largest = max(failures, key=lambda name: failures[name])
        if failures[largest] >= math.ceil(limit / len(names)):
            more = {**failures, largest: failures[largest] + extra}
            assert not is_run_at_fault(more, names, limit)


@given(num_workers=st.integers(1, 50), limit=st.integers(1, 1000))
def test_workers_that_all_fail_end_the_run_when_each_has_had_its_share(num_workers, limit):
    names = [str(number) for number in range(num_workers)]
    share = math.ceil(limit / num_workers)
    assert is_run_at_fault(dict.fromkeys(names, share), names, limit)
    if share > 1:
        assert not is_run_at_fault({**dict.fromkeys(names, share), "0": 0}, [*names, "x"], limit)
