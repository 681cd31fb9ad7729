"""Changes of the ledger come back from their bytes as they were."""

import pytest

from tests.fixtures.learner.dispatcher import make_partial_response, make_trajectory
from vcpo.wire.trajectory import partial_to_message, trajectory_to_message
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.redo_log.log_end import (
    UnreadableChangeError,
    change_from_bytes,
    change_to_bytes,
)


def submission(num_trajectories):
    trajectories = (
        make_trajectory("train-a-7", number, versions=(1, 2)) for number in range(num_trajectories)
    )
    return work_pb2.SubmitRequest(
        worker_id="w",
        lease_id="train-a-7",
        trajectories=[trajectory_to_message(each) for each in trajectories],
    )


CHANGES = {
    "lease_granted": ledger_pb2.LeaseGranted(
        lease_id="train-a-7", worker_id="w", prompt_index=3, oldest_version=1, is_requeued=True
    ),
    "submission": submission(1),
    "lease_ended": ledger_pb2.LeaseEnded(
        lease_id="train-a-7",
        reason="released",
        partial_responses=[partial_to_message(make_partial_response(1, 2))],
    ),
    "groups_dropped": ledger_pb2.GroupsDropped(lease_ids=["a-7", "a-2"], reason="lag_exceeded"),
    "batch_consumed": ledger_pb2.BatchConsumed(
        policy_version=4, lease_ids=["a-3", "a-1"], fresh_trajectory_ids=["x/0"]
    ),
    "version_published": ledger_pb2.VersionPublished(
        policy_version=5, checksum=2**64 - 1, num_ranks=8, num_shards=4
    ),
    "evaluated": ledger_pb2.Evaluated(step=50, accuracy=0.1),
    "lag_limit": ledger_pb2.LagLimit(steps=3, warning_level="critical", rollback_version=40),
    "learner_restarted": ledger_pb2.LearnerRestarted(incarnation="b"),
    "rolled_back": ledger_pb2.RolledBack(policy_version=3, returns_groups=True),
}


def test_every_kind_of_change_is_here():
    fields = ledger_pb2.LedgerChange.DESCRIPTOR.oneofs_by_name["change"].fields
    assert CHANGES.keys() == {field.name for field in fields}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_comes_back_from_its_bytes(kind):
    change = CHANGES[kind]
    data = change_to_bytes(change)
    assert data == ledger_pb2.LedgerChange(**{kind: change}).SerializeToString()
    assert change_from_bytes(data) == change


@pytest.mark.parametrize("num_trajectories", [2, 400])
def test_a_large_change_comes_back_from_its_bytes(num_trajectories):
    change = submission(num_trajectories)
    assert change_from_bytes(change_to_bytes(change)) == change


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x12\x02\x0a"], ids=["empty", "tag", "cut"])
def test_bytes_that_are_no_change_are_refused(data):
    with pytest.raises(UnreadableChangeError):
        change_from_bytes(data)
