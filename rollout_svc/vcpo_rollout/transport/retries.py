"""Which failed calls to the learner are repeated, after which pauses, and for how long.

```
transient   away, busy or late          repeated without end: a worker outlives a learner's restart
doubtful    a fault somewhere between   repeated `MAX_DOUBTFUL_FAILURES` times in a row
final       a request that is refused   not repeated
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

_LOGGER = logging.getLogger(__name__)
_Response = TypeVar("_Response")

FIRST_PAUSE_S: Final = 0.2
"""Longest pause after the first failure of a call; it doubles from failure to failure."""
LONGEST_PAUSE_S: Final = 5.0
MAX_DOUBTFUL_FAILURES: Final = 10
"""So many doubtful failures in a row end a call: they take 20 to 30 s."""


class LearnerFailedError(RuntimeError):
    """The learner, or the way to it, is at fault and stays so; says what was last heard."""


class Retries:
    """Repeats calls; the log has one line when they begin to fail, and one when one succeeds again.

    pause: Waits so many seconds.
    """

    def __init__(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._pause = pause
        self._num_failures = 0
        """Since the last call that succeeded, whichever it was."""

    async def run(
        self,
        name: str,
        call: Callable[[], Awaitable[_Response]],
        *,
        also: Collection[grpc.StatusCode] = (),
    ) -> _Response:
        """Make a call, and repeat it while its failure may pass, or has one of the codes `also`.

        Raises:
            LearnerFailedError: after `MAX_DOUBTFUL_FAILURES` doubtful failures in a row.
            grpc.aio.AioRpcError: for a failure that is final.
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
                else:
                    raise
                said = f"{error.code().name}: {error.details()}"
                if num_doubtful == MAX_DOUBTFUL_FAILURES:
                    raise LearnerFailedError(
                        f"{name} failed {num_doubtful} times in a row, at last with {said}; "
                        "look for the cause in the learner's log, or between worker and learner"
                    ) from error
            else:
                self._note_success(name)
                return response
            self._note_failure(name, said)
            # Jitter keeps the workers of a restarted learner from asking all at once.
            pause_s = longest_pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            await self._pause(pause_s)
            longest_pause_s = min(2 * longest_pause_s, LONGEST_PAUSE_S)

    def _note_failure(self, name: str, said: str) -> None:
        self._num_failures += 1
        level = logging.WARNING if self._num_failures == 1 else logging.DEBUG
        _LOGGER.log(level, "%s failed with %s; calls are repeated until they succeed", name, said)

    def _note_success(self, name: str) -> None:
        if self._num_failures:
            _LOGGER.info("%s succeeded after %d failed calls", name, self._num_failures)
            self._num_failures = 0
