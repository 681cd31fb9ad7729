"""Which failed calls to the learner are retried, after which pauses, and for how long.

```
transient   unreachable, busy or late   retried without end: a worker outlives a learner's restart
doubtful    a fault on the way          `MAX_DOUBTFUL_FAILURES` in a row end the call
final       the learner refuses         not retried
set aside   the learner refuses the     not retried; the worker exits
            worker, whatever it asks
```
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

import grpc

from vcpo.wire.client import is_doubtful, is_transient
from vcpo.wire.errors import set_aside_error

_LOGGER = logging.getLogger(__name__)
_Response = TypeVar("_Response")

FIRST_PAUSE_S: Final = 0.2
"""Longest pause after the first failure of a call; it doubles with every further failure."""
LONGEST_PAUSE_S: Final = 5.0
MAX_DOUBTFUL_FAILURES: Final = 10
"""A call ends after this many doubtful failures in a row, which take 20 to 30 s."""


class LearnerFailedError(RuntimeError):
    """The learner or the network keeps failing; the message holds the last error."""


class Retries:
    """Retries calls. Logs one line when calls begin to fail and one when they succeed again.

    pause: Waits for a number of seconds.
    """

    def __init__(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._pause = pause
        self._num_failures = 0
        """Failures of all calls since one last succeeded."""

    async def run(
        self,
        name: str,
        call: Callable[[], Awaitable[_Response]],
        *,
        also: Collection[grpc.StatusCode] = (),
    ) -> _Response:
        """Make a call, and retry it after transient failures and those with a code in `also`.

        Raises:
            LearnerFailedError: after `MAX_DOUBTFUL_FAILURES` doubtful failures in a row.
            SetAsideError: if the learner has taken this worker out of the run.
            grpc.aio.AioRpcError: for a final failure.
        """
        longest_pause_s = FIRST_PAUSE_S
        num_doubtful = 0
        while True:
            try:
                response = await call()
            except grpc.aio.AioRpcError as error:
                if is_doubtful(error):
                    num_doubtful += 1
                elif is_transient(error) or error.code() in also:
                    num_doubtful = 0
                elif (set_aside := set_aside_error(error)) is not None:
                    raise set_aside from error
                else:
                    raise
                reason = f"{error.code().name}: {error.details()}"
                if num_doubtful == MAX_DOUBTFUL_FAILURES:
                    raise LearnerFailedError(
                        f"{name} failed {num_doubtful} times in a row, at last with {reason}; "
                        "look for the cause in the learner's log, or between worker and learner"
                    ) from error
            else:
                if self._num_failures:
                    _LOGGER.info("%s succeeded after %d failed calls", name, self._num_failures)
                    self._num_failures = 0
                return response
            level = logging.DEBUG if self._num_failures else logging.WARNING
            _LOGGER.log(level, "%s failed with %s; it is retried until it succeeds", name, reason)
            self._num_failures += 1
            # Jitter spreads the requests of many workers after a restart of the learner.
            pause_s = longest_pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            await self._pause(pause_s)
            longest_pause_s = min(2 * longest_pause_s, LONGEST_PAUSE_S)
