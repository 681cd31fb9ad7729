"""Scripted failures: which requests fail, when, how often and how.

A crash test counts the calls of a good run, then repeats it once per call with
`Fault(effect=DROP, after=n, times=None)`: from call n on, the server is gone.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from tests.fakes.kubernetes.errors import ApiError
from tests.fakes.kubernetes.recorder import Recorded


class Effect(StrEnum):
    """What happens to a request that a fault hits."""

    REJECT = "reject"
    """An error answer; nothing is changed."""
    DROP = "drop"
    """The connection ends before anything is done."""
    LOSE_REPLY = "lose_reply"
    """The change is made, then the connection ends without an answer."""
    HANG = "hang"
    """No answer at all until the client gives up or the faults are cleared."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """One failure to play. Empty fields match every request.

    after: matching requests that pass first. times: how many fail then, None means all.
    error: the answer when the effect is REJECT.
    """

    effect: Effect = Effect.REJECT
    error: ApiError | None = None
    verb: str = ""
    resource: str = ""
    subresource: str | None = None
    name: str = ""
    user_agent: str = ""
    after: int = 0
    times: int | None = 1
    seen: int = field(default=0, init=False)
    released: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def matches(self, request: Recorded) -> bool:
        """Whether the request is of the kind that fails."""
        return (
            self.verb in ("", request.verb)
            and self.resource in ("", request.resource)
            and self.subresource in (None, request.subresource)
            and self.name in ("", request.name)
            and self.user_agent in request.user_agent
        )

    def hits(self, request: Recorded) -> bool:
        """Count the request and say whether it is one of those that fail."""
        if not self.matches(request):
            return False
        self.seen += 1
        position = self.seen - self.after
        return position > 0 and (self.times is None or position <= self.times)


class Faults:
    """The faults in play; the first that hits a request decides."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Play no fault any more, and end what hangs."""
        for fault in self._faults:
            fault.released.set()
        self._faults.clear()

    def on(self, request: Recorded) -> Fault | None:
        hits = [fault for fault in self._faults if fault.hits(request)]
        return hits[0] if hits else None


def stale() -> ApiError:
    """409: somebody was faster."""
    return ApiError(409, "Conflict", "the object has been modified; please apply your changes")


def overloaded(retry_after_s: int = 1) -> ApiError:
    """429: come back later."""
    message = "the server has received too many requests and has asked us to try again later"
    return ApiError(429, "TooManyRequests", message, retry_after_s=retry_after_s)


def broken() -> ApiError:
    """500: the server's own mistake."""
    return ApiError(500, "InternalError", "Internal error occurred: scripted")


def unavailable() -> ApiError:
    """503: nobody there to answer."""
    return ApiError(503, "ServiceUnavailable", "the server is currently unable to handle it")
