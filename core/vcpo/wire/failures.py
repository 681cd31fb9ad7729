"""Failed generations: why one failed, how often each failure happened, and both on the wire."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcpo.wire.v1 import work_pb2

MAX_MESSAGE_CHARACTERS: Final = 500
MAX_DISTINCT: Final = 16
"""Number of distinct failures that are kept; metrics count all failures."""
_ANNOUNCE_EVERY: Final = 100


class FailureCause(StrEnum):
    """What failed in a generation; also the label of the metric."""

    PROMPT = "prompt"
    """The environment raised while it created the prompt."""
    REPLY = "reply"
    """The environment raised between two turns of a multi-turn response."""
    REWARD = "reward"
    """The environment raised while it computed a reward."""
    TYPE = "type"
    """The environment returned a value of the wrong type."""
    NON_FINITE = "non_finite"
    """The environment returned a reward that is NaN or infinite."""
    TOO_LONG = "too_long"
    """The prompt and the response that may follow do not fit into the model's context."""
    TIMEOUT = "timeout"
    """A call to the environment took too long."""
    ENGINE = "engine"
    REFUSED = "refused"
    UNKNOWN = "unknown"

    @property
    def is_of_environment(self) -> bool:
        return self not in {FailureCause.ENGINE, FailureCause.REFUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the generation for one prompt failed."""

    cause: FailureCause
    message: str
    """The exception's message or the invalid value, in one line."""
    exception_type: str = ""
    """Class of the exception, such as `KeyError`; empty without an exception."""
    location: str = ""
    """`file:line` of the environment's code; empty if unknown."""

    @property
    def sentence(self) -> str:
        parts = (self.cause.value, self.exception_type, self.message)
        text = ": ".join(part for part in parts if part)
        return f"{text} ({self.location})" if self.location else text

    @property
    def kind(self) -> tuple[str, str, str]:
        return (self.cause, self.exception_type, self.location)


@dataclass(slots=True)
class FailureCount:
    """A distinct failure and its count."""

    latest: Failure
    latest_s: float
    """Time at which it last happened, on the caller's clock."""
    count: int = 0


class FailureCounts:
    """Counts up to `MAX_DISTINCT` distinct failures and selects those to log."""

    def __init__(self) -> None:
        self._distinct: dict[tuple[str, str, str], FailureCount] = {}

    def add(self, failure: Failure, *, now_s: float = 0.0) -> str | None:
        """Count a failure; return a line to log at its first and every hundredth occurrence."""
        entry = self._distinct.get(failure.kind)
        if entry is None:
            if len(self._distinct) >= MAX_DISTINCT:
                return None
            entry = self._distinct[failure.kind] = FailureCount(latest=failure, latest_s=now_s)
        entry.latest, entry.latest_s = failure, now_s
        entry.count += 1
        if entry.count == 1:
            return failure.sentence
        if entry.count % _ANNOUNCE_EVERY == 0:
            return f"{failure.sentence}; {entry.count} times so far"
        return None

    def __iter__(self) -> Iterator[FailureCount]:
        return iter(sorted(self._distinct.values(), key=lambda one: one.latest_s, reverse=True))


def one_line(text: str) -> str:
    """Return the text without line breaks, shortened to `MAX_MESSAGE_CHARACTERS`."""
    line = " ".join(text.split())
    is_long = len(line) > MAX_MESSAGE_CHARACTERS
    return f"{line[: MAX_MESSAGE_CHARACTERS - 3]}..." if is_long else line


_TO_WIRE = {
    cause: work_pb2.FailureCause.Value(f"FAILURE_CAUSE_{cause.name}")
    for cause in FailureCause
    if cause is not FailureCause.UNKNOWN
} | {FailureCause.UNKNOWN: work_pb2.FAILURE_CAUSE_UNSPECIFIED}
_FROM_WIRE = {number: cause for cause, number in _TO_WIRE.items()}


def failure_to_message(failure: Failure) -> work_pb2.Failure:
    """Convert a failure to its message."""
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
    """Read a failure; each text is shortened to one line, because any worker may have sent it."""
    return Failure(
        cause=_FROM_WIRE.get(message.cause, FailureCause.UNKNOWN),
        message=one_line(message.message),
        exception_type=one_line(message.exception_type),
        location=one_line(message.location),
    )
