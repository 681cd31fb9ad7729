"""Errors of the wire, one class per party that must act.

```
WireError
├── InvalidMessageError   the caller must change the message    INVALID_ARGUMENT
├── SetAsideError         the caller must exit               FAILED_PRECONDITION
├── NotFoundError         the caller must ask for another one   NOT_FOUND
└── UnavailableError      nobody; repeat the call later         UNAVAILABLE
```

Servers raise them. `vcpo.wire.guard` converts each to its gRPC status, with the text as details.
"""

from typing import Final

import grpc

from vcpo.records.reasons import SetAsideCause
from vcpo.wire.limits import MAX_ID_CHARACTERS, MAX_WAIT_S

_SET_ASIDE: Final = "vcpo-set-aside"
"""Trailing metadata of a refusal, with the cause."""


class WireError(Exception):
    """A call that the server cannot answer; `status` is the gRPC code that it returns."""

    status = grpc.StatusCode.UNKNOWN

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class InvalidMessageError(WireError, ValueError):
    """A malformed message; the text names the field, the value and the requirement."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, requirement: str) -> None:
        self.field = field
        super().__init__(f"{field}: must be {requirement}, got {value!r:.80}")


class SetAsideError(WireError):
    """A worker that the learner has taken out of the run; the text says why."""

    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, cause: SetAsideCause, message: str) -> None:
        self.cause = cause
        super().__init__(message)

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_SET_ASIDE, self.cause.value),)


class NotFoundError(WireError, LookupError):
    """The requested object does not exist, or exists no longer."""

    status = grpc.StatusCode.NOT_FOUND


class UnavailableError(WireError):
    """The server cannot answer now."""

    status = grpc.StatusCode.UNAVAILABLE


def set_aside_error(error: grpc.aio.AioRpcError) -> SetAsideError | None:
    """Return the error of a worker that was set aside, as its caller got it; None for another."""
    cause = dict(error.trailing_metadata() or ()).get(_SET_ASIDE)
    if cause not in set(SetAsideCause):
        return None
    return SetAsideError(SetAsideCause(str(cause)), error.details() or "")


def check_id(field: str, value: str) -> None:
    """Check that an identifier has 1 to `MAX_ID_CHARACTERS` characters that can be printed."""
    if not 1 <= len(value) <= MAX_ID_CHARACTERS or not value.isprintable():
        raise InvalidMessageError(field, value, f"1 to {MAX_ID_CHARACTERS} printable characters")


def check_wait(field: str, wait_s: float) -> float:
    """Check that a caller's wait is 0 to `MAX_WAIT_S` seconds, and return it."""
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise InvalidMessageError(field, wait_s, f"0 to {MAX_WAIT_S:g} seconds")
    return wait_s
