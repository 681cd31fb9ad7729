"""Changes of the ledger come back from their bytes as they were."""

import struct

import pytest

from tests.fixtures.learner.dispatcher import make_partial_response, make_trajectory
from vcpo.algo import Rollbacks, WarningLevel
from vcpo.records.reasons import DropReason
from vcpo.wire.trajectory import trajectory_to_message
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.ledger.changes import (
    BatchConsumed,
    Evaluated,
    GroupsDropped,
    LagLimitLeft,
    LearnerRestarted,
    LeaseEnded,
    LeaseGranted,
    RolledBack,
    TrajectoriesAccepted,
    VersionPublished,
)
from vcpo_learner.redo_log.encoding import (
    UnreadableChangeError,
    change_from_bytes,
    change_to_bytes,
)

(FLOAT32,) = struct.unpack("<f", struct.pack("<f", -0.1))
CHANGES = [
    LeaseGranted(
        lease_id="train-a-7",
        worker_id="w",
        grant_number=7,
        prompt_index=3,
        policy_version=2,
        oldest_version=1,
        is_requeued=True,
    ),
    TrajectoriesAccepted(
        lease_id="train-a-7",
        trajectories=(make_trajectory("train-a-7", 1, versions=(1, 2), logprob=FLOAT32),),
    ),
    LeaseEnded(
        lease_id="train-a-7",
        reason=DropReason.RELEASED,
        partial_responses=(make_partial_response(1, 2),),
    ),
    GroupsDropped(lease_ids=("train-a-7", "train-a-2"), reason=DropReason.LAG_EXCEEDED),
    BatchConsumed(
        policy_version=4, lease_ids=("train-a-3", "train-a-1"), fresh_trajectory_ids=("x/0",)
    ),
    VersionPublished(policy_version=5, checksum=2**64 - 1, num_ranks=8, num_shards=4),
    Evaluated(step=50, accuracy=0.1),
    LagLimitLeft(steps=3, level=WarningLevel.CRITICAL, rollbacks=Rollbacks(number=2, version=40)),
    LearnerRestarted(incarnation="b"),
    RolledBack(policy_version=3, returns_groups=True),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_a_change_comes_back_from_its_bytes(change):
    assert change_from_bytes(change_to_bytes(change)) == change


@pytest.mark.parametrize("num_trajectories", [1, 2, 400])
def test_a_request_comes_back_as_the_trajectories_that_it_brought(num_trajectories):
    trajectories = tuple(
        make_trajectory("train-a-7", number, versions=(1, 2), logprob=FLOAT32)
        for number in range(num_trajectories)
    )
    request = work_pb2.SubmitRequest(
        worker_id="w",
        lease_id="train-a-7",
        trajectories=[trajectory_to_message(each) for each in trajectories],
    )
    change = TrajectoriesAccepted(lease_id="train-a-7", trajectories=trajectories, request=request)
    data = change_to_bytes(change)
    assert data == ledger_pb2.LedgerChange(submission=request).SerializeToString()
    assert change_from_bytes(data) == change


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x12\x02\x0a"], ids=["empty", "tag", "cut"])
def test_bytes_that_are_no_change_are_refused(data):
    with pytest.raises(UnreadableChangeError):
        change_from_bytes(data)
