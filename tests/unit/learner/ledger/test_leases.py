from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import (
    TIMEOUT_S,
    ManualClock,
    make_partial_response,
    make_trajectories,
    make_trajectory,
)
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.trajectory import prompt_checksum
from vcpo_learner.ledger import lease_book
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.lease_book import LeaseBook


@pytest.fixture
def book():
    return LeaseBook(prefix="train-now", timeout_s=TIMEOUT_S, clock=ManualClock())


def lease_of(book, *numbers, worker_id="w", **prompt):
    return book.open(
        Lease(**{"prompt_index": 0, **prompt}),
        worker_id=worker_id,
        response_numbers=numbers,
        policy_version=0,
    )


def submit(book, lease_id, trajectories):
    lease = book.get(lease_id)
    if lease is None:
        return [book.outcome_when_closed(lease_id)] * len(trajectories)
    return book.accept(lease, trajectories)


def open_lease(book):
    return lease_of(book, 0)


def test_a_book_knows_its_own_ids_by_their_form(book):
    lease = open_lease(book)
    book.close(lease.lease_id)
    assert book.has_issued(lease.lease_id)
    assert not book.has_issued("train-nowhere-0")


def test_the_memory_of_fulfilled_leases_is_bounded(book, monkeypatch):
    monkeypatch.setattr(lease_book, "_REMEMBERED_LEASES", 2)
    closed = [open_lease(book) for _ in range(3)]
    for lease in closed:
        submit(book, lease.lease_id, make_trajectories(lease))
    outcomes = [submit(book, lease.lease_id, make_trajectories(lease))[0] for lease in closed]
    assert outcomes == ["lease_ended", "duplicate", "duplicate"]


def test_all_responses_of_a_lease_are_to_one_prompt(book):
    lease = lease_of(book, 0, 1)
    submit(book, lease.lease_id, [make_trajectory(lease.lease_id, 0)])
    other = replace(make_trajectory(lease.lease_id, 1), prompt_token_ids=(3, 4, 5))
    with pytest.raises(InvalidMessageError, match=r"trajectories\[0\]\.prompt_token_ids: must be"):
        submit(book, lease.lease_id, [other])
    assert lease.num_missing == 1


@pytest.mark.parametrize(
    ("prompt_of_partial", "is_fine"), [((3, 4), True), ((4, 3), False), (None, True)]
)
def test_a_response_belongs_to_the_prompt_of_its_lease(book, prompt_of_partial, is_fine):
    partial = replace(
        make_partial_response(0),
        prompt_xxh3=prompt_checksum(prompt_of_partial) if prompt_of_partial else 0,
    )
    lease = lease_of(book, 0, partial_responses=(partial,))
    if is_fine:
        assert submit(book, lease.lease_id, make_trajectories(lease)) == ["accepted"]
    else:
        with pytest.raises(InvalidMessageError, match="the lease's partial responses"):
            submit(book, lease.lease_id, make_trajectories(lease))


@given(st.lists(st.tuples(st.sampled_from(["open", "submit", "close"]), st.integers(0, 9))))
def test_the_sums_of_a_book_are_those_of_its_leases(steps):
    book = LeaseBook(prefix="train-now", timeout_s=TIMEOUT_S, clock=ManualClock())
    for action, number in steps:
        lease_id = f"train-now-{number}"
        lease = book.get(lease_id)
        if action == "open":
            numbers = range(1 + number % 2)
            lease_of(book, *numbers, worker_id=f"w{number % 3}", prompt_index=number % 4)
        elif action == "close":
            book.close(lease_id)
        elif lease is not None:
            submit(book, lease_id, [make_trajectory(lease_id, len(lease.arrived))])
        leases = book.all()
        assert book.num_missing == sum(one.num_missing for one in leases)
        assert book.num_accepted == sum(len(one.arrived) for one in leases)
        assert set(book.prompts()) == {one.prompt_index for one in leases}
        missing = dict.fromkeys((one.worker_id for one in leases), 0)
        for one in leases:
            missing[one.worker_id] += one.num_missing
        assert book.in_flight_by_worker() == missing
        for worker_id in ("w0", "w1", "w2"):
            held = [one for one in leases if one.worker_id == worker_id]
            assert book.held_by(worker_id) == held
