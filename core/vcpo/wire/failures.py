"""Failed generations: why one failed, how often each failure happened, and both on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcpo.wire.v1 import work_pb2

MAX_MESSAGE_CHARACTERS: Final = 500
MAX_DISTINCT: Final = 16
"""Distinct failures that are kept, whatever workers send; metrics count all of them."""
_ANNOUNCE_EVERY: Final = 100


class FailureCause(StrEnum):
    """What failed when a prompt was not answered; also the label of the metric."""

    PROMPT = "prompt"
    """The environment raised while it made the prompt."""
    REPLY = "reply"
    """It raised between two turns of a conversation."""
    REWARD = "reward"
    """It raised while it judged a response."""
    TYPE = "type"
    """It returned something of another type than the seam wants."""
    NON_FINITE = "non_finite"
    """Its reward was NaN or infinite."""
    TIMEOUT = "timeout"
    """A call of it took too long."""
    ENGINE = "engine"
    """The engine could not sample."""
    REFUSED = "refused"
    """The learner refused the trajectories as malformed."""
    UNKNOWN = "unknown"
    """The worker did not say."""

    @property
    def is_of_environment(self) -> bool:
        """Whether the environment is to be put right, rather than what samples."""
        return self not in {FailureCause.ENGINE, FailureCause.REFUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one prompt was not answered."""

    cause: FailureCause
    message: str
    """What was raised or returned, in one line."""
    exception_type: str = ""
    """Class of the exception, as `KeyError`; empty when nothing was raised."""
    location: str = ""
    """`file:line` of the environment's code; empty when it is not known."""

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        parts = (self.cause.value, self.exception_type, self.message)
        said = ": ".join(part for part in parts if part)
        return f"{said} ({self.location})" if self.location else said

    @property
    def kind(self) -> tuple[str, str, str]:
        """What makes two failures the same: their messages may name an item each."""
        return (self.cause, self.exception_type, self.location)


@dataclass(slots=True)
class FailureCount:
    """One distinct failure and how often it happened."""

    latest: Failure
    latest_s: float
    """When, by the counter's clock."""
    count: int = 0


class FailureCounts:
    """Counts distinct failures, at most `MAX_DISTINCT`, and says when one is worth a line."""

    def __init__(self) -> None:
        self._distinct: dict[tuple[str, str, str], FailureCount] = {}

    def add(self, failure: Failure, *, now_s: float = 0.0) -> str | None:
        """Count a failure; returns a line for its first time and for every hundredth."""
        known = self._distinct.get(failure.kind)
        if known is None:
            if len(self._distinct) >= MAX_DISTINCT:
                return None
            known = self._distinct[failure.kind] = FailureCount(latest=failure, latest_s=now_s)
        known.latest, known.latest_s = failure, now_s
        known.count += 1
        if known.count == 1:
            return failure.sentence
        if known.count % _ANNOUNCE_EVERY == 0:
            return f"{failure.sentence}; {known.count} times so far"
        return None

    def __iter__(self) -> Iterator[FailureCount]:
        """The distinct failures, the latest first."""
        return iter(sorted(self._distinct.values(), key=lambda one: one.latest_s, reverse=True))


def one_line(text: str) -> str:
    """A message without line breaks, at most `MAX_MESSAGE_CHARACTERS` long."""
    line = " ".join(text.split())
    is_long = len(line) > MAX_MESSAGE_CHARACTERS
    return f"{line[: MAX_MESSAGE_CHARACTERS - 3]}..." if is_long else line


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
