"""Where an environment's code runs: in threads of its own, with its failures named.

It is somebody else's: it may block for minutes, raise anything and return anything. In asyncio's
own threads, of which there are few, slow environments would hold up what else uses them: weights
that are read, checked and written.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import reprlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from vcpo.wire.failures import Failure, FailureCause, one_line

_Result = TypeVar("_Result")

MOST_THREADS: Final = 256
"""So many calls run at once; others wait. A thread is cheap, what it starts may not be."""
THREAD_NAME: Final = "environment"
"""Names of the threads begin with it."""
_OUR_FOLDER: Final = Path(__file__).parent


class EnvironmentFailedError(RuntimeError):
    """The environment's own code failed; the prompt is reported as failed, with the cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


@contextlib.contextmanager
def environment_errors(cause: FailureCause) -> Iterator[None]:
    """Around calls of an environment, which may raise anything.

    Raises: EnvironmentFailedError with `cause`, the exception, and the line of the environment.
    """
    try:
        yield
    except EnvironmentFailedError:
        raise
    except Exception as error:  # it is the user's code
        failure = Failure(
            cause=cause,
            exception_type=type(error).__name__,
            message=one_line(str(error)),
            location=_environment_line(traceback.extract_tb(error.__traceback__)),
        )
        raise EnvironmentFailedError(failure) from error


def require_type(value: object, wanted: type[_Result], function: Callable[..., object]) -> _Result:
    """Check what a function of the environment returned.

    Raises: EnvironmentFailedError naming the function, where it stands and what it returned.
    """
    if not isinstance(value, wanted):
        raise _wrong(FailureCause.TYPE, function, value, f"a {wanted.__name__}")
    return value


def check_reward(value: object, function: Callable[..., object]) -> float:
    """Check a reward: a finite number of any library's type.

    Raises: EnvironmentFailedError naming the function, where it stands and what it returned.
    """
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise _wrong(FailureCause.TYPE, function, value, "a number")
    with environment_errors(FailureCause.TYPE):
        reward = float(value)  # type: ignore[arg-type]  # it has __float__
    if not math.isfinite(reward):
        raise _wrong(FailureCause.NON_FINITE, function, value, "a finite number")
    return reward


def num_threads(num_answers: int) -> int:
    """Threads for as many calls as there may be answers under way (at least 1), within bounds."""
    return min(num_answers, MOST_THREADS)


class EnvironmentThreads:
    """Threads for the calls of `num_answers` answers under way; they start as they are needed.

    timeout_s: for one call, the wait for a free thread included; None is no limit.
    """

    def __init__(self, num_answers: int, *, timeout_s: float | None = None) -> None:
        self._pool = ThreadPoolExecutor(num_threads(num_answers), thread_name_prefix=THREAD_NAME)
        self._timeout_s = timeout_s

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in one of the threads; what it raises comes through.

        Whoever is cancelled no longer waits for it, but the call goes on to its end.

        Raises:
            EnvironmentFailedError: when it takes too long, with the line where it is.
        """
        threads: list[int] = []

        def run() -> _Result:
            threads.append(threading.get_ident())
            return function()

        calling = asyncio.get_running_loop().run_in_executor(self._pool, run)
        try:
            done, _ = await asyncio.wait({calling}, timeout=self._timeout_s)
        finally:
            calling.cancel()  # changes nothing when it is done
        if done:
            return calling.result()
        raise EnvironmentFailedError(self._late(threads[0] if threads else None))

    def close(self) -> None:
        """Take no further call, and wait for none: what blocks may do so for ever."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _late(self, thread: int | None) -> Failure:
        limit = f"{self._timeout_s:g} s (environment.callTimeoutSeconds)"
        if thread is None:
            message = f"no thread was free within {limit}: earlier calls have not returned"
            return Failure(cause=FailureCause.TIMEOUT, message=message)
        stack = traceback.extract_stack(sys._current_frames().get(thread))
        return Failure(
            cause=FailureCause.TIMEOUT,
            message=f"a call has not returned after {limit}",
            location=_environment_line(stack),
        )


def _wrong(
    cause: FailureCause, function: Callable[..., object], value: object, wanted: str
) -> EnvironmentFailedError:
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(function, "__code__", None)
    kind = "" if value is None or isinstance(value, float) else f"{type(value).__name__} "
    shown = one_line(f"{name} must return {wanted}, got {kind}{reprlib.repr(value)}")
    location = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return EnvironmentFailedError(Failure(cause=cause, message=shown, location=location))


def _environment_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost `file:line` beside the first file that is called from here.

    Deeper ones are libraries that the environment uses: their lines tell its author less.
    """
    ours = itertools.dropwhile(lambda frame: not _is_ours(frame), frames)
    theirs = [frame for frame in ours if not _is_ours(frame)]
    beside = [
        frame for frame in theirs if Path(frame.filename).parent == Path(theirs[0].filename).parent
    ]
    return f"{beside[-1].filename}:{beside[-1].lineno}" if beside else ""


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).parent == _OUR_FOLDER
