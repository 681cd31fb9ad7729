"""Failed generations on the wire."""

from __future__ import annotations

from vcpo.failures import Failure, FailureCause, one_line
from vcpo.wire.v1 import work_pb2

_TO_WIRE = {
    FailureCause.UNKNOWN: work_pb2.FAILURE_CAUSE_UNSPECIFIED,
    FailureCause.PROMPT: work_pb2.FAILURE_CAUSE_PROMPT,
    FailureCause.REPLY: work_pb2.FAILURE_CAUSE_REPLY,
    FailureCause.REWARD: work_pb2.FAILURE_CAUSE_REWARD,
    FailureCause.TYPE: work_pb2.FAILURE_CAUSE_TYPE,
    FailureCause.NON_FINITE: work_pb2.FAILURE_CAUSE_NON_FINITE,
    FailureCause.TIMEOUT: work_pb2.FAILURE_CAUSE_TIMEOUT,
    FailureCause.ENGINE: work_pb2.FAILURE_CAUSE_ENGINE,
    FailureCause.REFUSED: work_pb2.FAILURE_CAUSE_REFUSED,
}
_FROM_WIRE = {number: cause for cause, number in _TO_WIRE.items()}


def failure_to_message(failure: Failure) -> work_pb2.Failure:
    """Write a failure."""
    return work_pb2.Failure(
        kind=(
            work_pb2.FAILURE_KIND_ENVIRONMENT
            if failure.cause.is_of_environment
            else work_pb2.FAILURE_KIND_ENGINE
        ),
        cause=_TO_WIRE[failure.cause],
        message=failure.message,
        exception_type=failure.exception_type,
        location=failure.location,
    )


def failure_from_message(message: work_pb2.Failure) -> Failure:
    """Read a failure; texts are cut to one short line each, whoever wrote them."""
    return Failure(
        cause=_FROM_WIRE.get(message.cause, FailureCause.UNKNOWN),
        message=one_line(message.message),
        exception_type=one_line(message.exception_type),
        location=one_line(message.location),
    )
