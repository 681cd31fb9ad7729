"""Errors of the wire, told apart by who must act.

```
WireError
├── InvalidMessageError   the caller must change the message    INVALID_ARGUMENT
├── NotFoundError         the caller asks for something gone    NOT_FOUND
└── UnavailableError      nobody; try again later               UNAVAILABLE
```

Servers raise them; `vcpo.wire.server` turns each into its gRPC status with the text as details.
"""

from __future__ import annotations

import grpc


class WireError(Exception):
    """A call that could not be answered; `status` is the gRPC code that says so."""

    status = grpc.StatusCode.UNKNOWN


class InvalidMessageError(WireError, ValueError):
    """A malformed message: names the field, the value received and what would be right."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, requirement: str) -> None:
        self.field = field
        super().__init__(f"{field}: must be {requirement}, got {value!r:.80}")


class NotFoundError(WireError, LookupError):
    """Something that does not exist, or no longer."""

    status = grpc.StatusCode.NOT_FOUND


class UnavailableError(WireError):
    """A server that cannot answer now."""

    status = grpc.StatusCode.UNAVAILABLE
