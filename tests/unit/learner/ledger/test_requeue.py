"""Tokens sampled for an ended lease stay with its prompt and are resumed by the next lease."""

import pytest

from tests.fixtures.learner.dispatcher import (
    ManualClock,
    dispatcher_fixture,
    make_ledger,
    make_partial_response,
    make_trajectories,
    work_request,
)
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.trajectory import FinishReason
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger import ledger as ledger_module

UNDER_WAY = make_partial_response(0, 1)
COMPLETE = make_partial_response(1, finish_reason=FinishReason.STOP, number=1)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def ledger(clock):
    return make_ledger(clock)


def grant_one(ledger, *, version=1, **limits):
    (lease,) = ledger.grant("w", num_groups=1, policy_version=version, **limits)
    return lease


def release_with(ledger, *partial):
    """The ledger's first prompt, leased and released with partial responses."""
    lease = grant_one(ledger)
    ledger.release("w", [lease.lease_id], partial)


def test_the_next_grant_of_the_prompt_carries_its_partial_responses(ledger):
    release_with(ledger, COMPLETE, UNDER_WAY)
    lease = grant_one(ledger)
    assert (lease.prompt_index, lease.partial_responses) == (0, (COMPLETE, UNDER_WAY))
    assert grant_one(ledger).partial_responses == ()


def test_more_responses_than_the_lease_wants_are_refused(ledger):
    lease = grant_one(ledger)
    with pytest.raises(InvalidMessageError, match="begun: must be at most 2 responses"):
        ledger.release("w", [lease.lease_id], [UNDER_WAY] * 3)
    assert ledger.counts().in_flight == 2


def test_grants_stop_before_a_message_grows_too_large(ledger, monkeypatch):
    monkeypatch.setattr(ledger_module, "MAX_PARTIAL_TOKENS", 3)
    for lease in ledger.grant("w", num_groups=3, policy_version=1):
        ledger.release("w", [lease.lease_id], [UNDER_WAY])
    first = ledger.grant("w", num_groups=3, policy_version=1)
    assert [lease.prompt_index for lease in first] == [0]
    assert [lease.prompt_index for lease in ledger.grant("w", num_groups=1, policy_version=1)] == [
        1
    ]


def test_a_restart_resumes_requeued_prompts_and_those_in_flight(ledger, clock):
    release_with(ledger, UNDER_WAY)
    in_flight = grant_one(ledger)
    ledger.release("w", [grant_one(ledger).lease_id], [COMPLETE])
    (part,) = ledger.snapshot().parts()
    data = part.SerializeToString()
    later = make_ledger(clock, incarnation="later")
    later.restore([ledger_pb2.LedgerSnapshot.FromString(data)])
    later.restart()
    leases = later.grant("w", num_groups=3, policy_version=1)
    assert in_flight.partial_responses == (UNDER_WAY,)
    assert [lease.partial_responses for lease in leases] == [(UNDER_WAY,), (COMPLETE,), ()]


async def test_a_token_at_the_bound_may_still_be_trained_on_and_an_older_one_not():
    # Two batches are consumed and the lag limit is 1: the next may train on tokens of version 1.
    fixture = dispatcher_fixture()
    for version in (0, 1):
        for lease in fixture.ledger.grant("w", num_groups=2, policy_version=version):
            fixture.ledger.submit(lease.lease_id, make_trajectories(lease, versions=(version,)))
        assert fixture.ledger.take_batch(step=version, max_policy_lag_steps=1)
    fixture.dispatcher.policy_version = 2
    old, young = await fixture.dispatcher.lease(work_request(held=2, room=4), wait_s=0)
    for partial, assignment in ((UNDER_WAY, old), (COMPLETE, young)):
        fixture.dispatcher.release("w", [assignment.lease_id], [partial])
    again = await fixture.dispatcher.lease(work_request(held=2, room=4), wait_s=0)
    assert [one.partial_responses for one in again] == [(), (COMPLETE,)]


async def test_a_version_that_does_not_exist_yet_is_refused():
    fixture = dispatcher_fixture()
    (assignment,) = await fixture.dispatcher.lease(work_request(room=2), wait_s=0)
    with pytest.raises(InvalidMessageError, match=r"begun\[0\]\.version_spans"):
        fixture.dispatcher.release("w", [assignment.lease_id], [make_partial_response(1)])
