"""Changes of the ledger as bytes, and back: one `LedgerChange` message each."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from vcpo.records.reasons import DropReason
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.trajectory import (
    partial_from_message,
    partial_to_message,
    trajectory_from_message,
    write_trajectory,
)
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.ledger.changes import (
    BatchConsumed,
    Change,
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
from vcpo_learner.ledger.lag_limit import left_from_message, left_to_message

_SUBMISSION_TAG: Final = ledger_pb2.LedgerChange.SUBMISSION_FIELD_NUMBER << 3 | 2
"""Before the size and the bytes of a message in a field of another one."""


class UnreadableChangeError(ValueError):
    """Bytes are no change of the ledger; the message says why."""


def change_to_bytes(change: Change) -> bytes:
    """Return a change as bytes; log-probabilities are rounded to float32, as on the wire."""
    if isinstance(change, TrajectoriesAccepted) and change.request is not None:
        return _submission_to_bytes(change.request)
    return _to_message(change).SerializeToString()


def change_from_bytes(data: bytes) -> Change:
    """Read what `change_to_bytes` returned.

    Raises:
        UnreadableChangeError: if it is something else.
    """
    try:
        return _from_message(ledger_pb2.LedgerChange.FromString(data))
    except (DecodeError, InvalidMessageError, ValueError) as error:
        raise UnreadableChangeError(str(error)) from error


def _submission_to_bytes(request: work_pb2.SubmitRequest) -> bytes:
    """Return a change with `submission`: a message that is put into another one is copied."""
    data = request.SerializeToString()
    head, size = bytearray([_SUBMISSION_TAG]), len(data)
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return b"".join((head, data))


def _to_message(change: Change) -> ledger_pb2.LedgerChange:
    match change:
        case LeaseGranted():
            granted = ledger_pb2.LeaseGranted(
                lease_id=change.lease_id,
                worker_id=change.worker_id,
                grant_number=change.grant_number,
                prompt_index=change.prompt_index,
                policy_version=change.policy_version,
                oldest_version=change.oldest_version,
                is_requeued=change.is_requeued,
            )
            return ledger_pb2.LedgerChange(lease_granted=granted)
        case TrajectoriesAccepted():
            return _accepted_to_message(change)
        case LeaseEnded():
            ended = ledger_pb2.LeaseEnded(
                lease_id=change.lease_id,
                reason=change.reason,
                partial_responses=[partial_to_message(each) for each in change.partial_responses],
            )
            return ledger_pb2.LedgerChange(lease_ended=ended)
        case GroupsDropped():
            dropped = ledger_pb2.GroupsDropped(lease_ids=change.lease_ids, reason=change.reason)
            return ledger_pb2.LedgerChange(groups_dropped=dropped)
        case BatchConsumed():
            consumed = ledger_pb2.BatchConsumed(
                policy_version=change.policy_version,
                lease_ids=change.lease_ids,
                fresh_trajectory_ids=change.fresh_trajectory_ids,
            )
            return ledger_pb2.LedgerChange(batch_consumed=consumed)
        case VersionPublished():
            published = ledger_pb2.VersionPublished(
                policy_version=change.policy_version,
                checksum=change.checksum,
                num_ranks=change.num_ranks,
                num_shards=change.num_shards,
            )
            return ledger_pb2.LedgerChange(version_published=published)
        case Evaluated() | LagLimitLeft():
            return _note_to_message(change)
        case LearnerRestarted():
            restarted = ledger_pb2.LearnerRestarted(incarnation=change.incarnation)
            return ledger_pb2.LedgerChange(learner_restarted=restarted)
        case RolledBack():
            rolled_back = ledger_pb2.RolledBack(
                policy_version=change.policy_version, returns_groups=change.returns_groups
            )
            return ledger_pb2.LedgerChange(rolled_back=rolled_back)


def _accepted_to_message(change: TrajectoriesAccepted) -> ledger_pb2.LedgerChange:
    message = ledger_pb2.LedgerChange()
    message.submission.lease_id = change.lease_id
    for each in change.trajectories:
        write_trajectory(message.submission.trajectories.add(), each)
    return message


def _note_to_message(change: Evaluated | LagLimitLeft) -> ledger_pb2.LedgerChange:
    if isinstance(change, LagLimitLeft):
        return ledger_pb2.LedgerChange(lag_limit_left=left_to_message(change))
    evaluated = ledger_pb2.Evaluated(step=change.step, accuracy=change.accuracy)
    return ledger_pb2.LedgerChange(evaluated=evaluated)


def _from_message(message: ledger_pb2.LedgerChange) -> Change:
    match message.WhichOneof("change"):
        case "lease_granted":
            return _lease_granted(message.lease_granted)
        case "submission":
            return _trajectories_accepted(message.submission)
        case "lease_ended":
            return _lease_ended(message.lease_ended)
        case "groups_dropped":
            dropped = message.groups_dropped
            return GroupsDropped(
                lease_ids=tuple(dropped.lease_ids), reason=DropReason(dropped.reason)
            )
        case "batch_consumed":
            consumed = message.batch_consumed
            return BatchConsumed(
                policy_version=consumed.policy_version,
                lease_ids=tuple(consumed.lease_ids),
                fresh_trajectory_ids=tuple(consumed.fresh_trajectory_ids),
            )
        case "version_published":
            published = message.version_published
            return VersionPublished(
                policy_version=published.policy_version,
                checksum=published.checksum,
                num_ranks=published.num_ranks,
                num_shards=published.num_shards,
            )
        case "evaluated" | "lag_limit_left":
            return _note_from_message(message)
        case "learner_restarted":
            return LearnerRestarted(incarnation=message.learner_restarted.incarnation)
        case "rolled_back":
            rolled_back = message.rolled_back
            return RolledBack(
                policy_version=rolled_back.policy_version,
                returns_groups=rolled_back.returns_groups,
            )
    raise UnreadableChangeError("it holds no change that this version of vcpo knows")


def _note_from_message(message: ledger_pb2.LedgerChange) -> Evaluated | LagLimitLeft:
    if message.HasField("lag_limit_left"):
        return left_from_message(message.lag_limit_left)
    return Evaluated(step=message.evaluated.step, accuracy=message.evaluated.accuracy)


def _lease_granted(message: ledger_pb2.LeaseGranted) -> LeaseGranted:
    return LeaseGranted(
        lease_id=message.lease_id,
        worker_id=message.worker_id,
        grant_number=message.grant_number,
        prompt_index=message.prompt_index,
        policy_version=message.policy_version,
        oldest_version=message.oldest_version,
        is_requeued=message.is_requeued,
    )


def _trajectories_accepted(message: work_pb2.SubmitRequest) -> TrajectoriesAccepted:
    return TrajectoriesAccepted(
        lease_id=message.lease_id,
        trajectories=tuple(
            trajectory_from_message(each, path=f"trajectories[{index}]")
            for index, each in enumerate(message.trajectories)
        ),
    )


def _lease_ended(message: ledger_pb2.LeaseEnded) -> LeaseEnded:
    return LeaseEnded(
        lease_id=message.lease_id,
        reason=DropReason(message.reason),
        partial_responses=tuple(
            partial_from_message(each, path=f"partial_responses[{index}]")
            for index, each in enumerate(message.partial_responses)
        ),
    )
