"""Where an environment's code runs: in threads of its own, with its failures named.

It is somebody else's: it may block for minutes and raise anything. In asyncio's own threads, of
which there are few, slow environments would hold up what else uses them: weights that are read,
checked and written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

_Result = TypeVar("_Result")

MOST_THREADS: Final = 256
"""So many calls run at once; others wait. A thread is cheap, what it starts may not be."""
THREAD_NAME: Final = "environment"
"""Names of the threads begin with it."""


class EnvironmentFailedError(RuntimeError):
    """The environment's own code failed; the prompt is reported as failed, with the cause."""


@contextlib.contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Around calls of an environment, which may raise anything.

    Raises: EnvironmentFailedError naming `what` failed and how.
    """
    try:
        yield
    except Exception as error:  # it is the user's code
        raise EnvironmentFailedError(f"{what}: {type(error).__name__}: {error}") from error


def num_threads(num_answers: int) -> int:
    """Threads for as many calls as there may be answers under way (at least 1), within bounds."""
    return min(num_answers, MOST_THREADS)


class ForeignThreads:
    """Threads for the calls of `num_answers` answers under way; they start as they are needed."""

    def __init__(self, num_answers: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads(num_answers), thread_name_prefix=THREAD_NAME)

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in one of the threads; what it raises comes through.

        Whoever is cancelled no longer waits for it, but the call goes on to its end.
        """
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def close(self) -> None:
        """Take no further call, and wait for none: what blocks may do so for ever."""
        self._pool.shutdown(wait=False, cancel_futures=True)
