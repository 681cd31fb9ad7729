"""Errors of the wire, one class per party that must act.

```
WireError
├── InvalidMessageError   the caller must change the message    INVALID_ARGUMENT
├── PermissionDeniedError the caller may not act for another PERMISSION_DENIED
├── NotFoundError         the caller must ask for another one   NOT_FOUND
└── UnavailableError      nobody; repeat the call later         UNAVAILABLE
```

Servers raise them. `vcpo.wire.guard` converts each to its gRPC status, with the text as details.
"""

from __future__ import annotations

import grpc


class WireError(Exception):
    """A call that the server cannot answer; `status` is the gRPC code that it returns."""

    status = grpc.StatusCode.UNKNOWN


class InvalidMessageError(WireError, ValueError):
    """A malformed message; the text names the field, the value and the requirement."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, requirement: str) -> None:
        self.field = field
        super().__init__(f"{field}: must be {requirement}, got {value!r:.80}")


class PermissionDeniedError(WireError):
    """A caller that acts for a worker that it is not."""

    status = grpc.StatusCode.PERMISSION_DENIED


class NotFoundError(WireError, LookupError):
    """The requested object does not exist, or exists no longer."""

    status = grpc.StatusCode.NOT_FOUND


class UnavailableError(WireError):
    """The server cannot answer now."""

    status = grpc.StatusCode.UNAVAILABLE
