"""Runs the environment's code in its own threads, and names its failures.

The environment is user code: it may block for minutes, raise anything and return anything. asyncio
has few threads of its own, in which weights are read, verified and written; a slow environment
would block them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol, TypeVar

from vcpo import tracing
from vcpo.metrics.label_values import EnvironmentFault
from vcpo.wire.failures import Failure, FailureCause, one_line
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.sandbox.runner import SandboxError

_Result = TypeVar("_Result")

MOST_THREADS: Final = 256
"""Largest number of calls at once; others wait. Each call may start costly work of its own."""
THREAD_NAME: Final = "environment"
"""Prefix of the threads' names."""
_OUR_FOLDERS: Final = (Path(__file__).parent, Path(__file__).parents[1] / "engines")
"""Folders whose code calls an environment, or a chat template for it."""


class EnvironmentFailedError(RuntimeError):
    """The environment's code failed; the worker reports the prompt as failed, with the cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


@contextlib.contextmanager
def environment_errors(cause: FailureCause) -> Iterator[None]:
    """Convert any exception of the environment's code.

    Raises: EnvironmentFailedError with `cause`, the exception, and the environment's line.
    """
    try:
        yield
    except EnvironmentFailedError:
        raise
    except Exception as error:  # user code may raise anything
        failure = Failure(
            cause=cause,
            exception_type=type(error).__name__,
            message=one_line(str(error)),
            location=_environment_line(traceback.extract_tb(error.__traceback__)),
        )
        raise EnvironmentFailedError(failure) from error


def require_type(value: object, wanted: type[_Result], function: Callable[..., object]) -> _Result:
    """Check the type of what a function of the environment returned.

    Raises: EnvironmentFailedError naming the function, its location and the value.
    """
    if not isinstance(value, wanted):
        raise _wrong_value(FailureCause.TYPE, function, value, f"a {wanted.__name__}")
    return value


def check_reward(value: object, function: Callable[..., object]) -> float:
    """Return a reward as a float; it must be a finite number, of any library's type.

    Raises: EnvironmentFailedError naming the function, its location and the value.
    """
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise _wrong_value(FailureCause.TYPE, function, value, "a number")
    with environment_errors(FailureCause.TYPE):
        reward = float(value)  # type: ignore[arg-type]  # it has __float__
    if not math.isfinite(reward):
        raise _wrong_value(FailureCause.NON_FINITE, function, value, "a finite number")
    return reward


def num_threads(num_sequences: int) -> int:
    """Return the number of threads for so many concurrent sequences (at least 1), within bounds."""
    return min(num_sequences, MOST_THREADS)


class EnvironmentCalls(Protocol):
    """Where the environment's code runs."""

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function; its exceptions pass through."""
        ...


class EnvironmentThreads:
    """Threads for the calls of `num_sequences` concurrent sequences; each starts when needed.

    timeout_s: limit of one call, including the wait for a free thread; None sets no limit.
    """

    def __init__(
        self, num_sequences: int, *, gauges: RolloutGauges, timeout_s: float | None = None
    ) -> None:
        self._pool = ThreadPoolExecutor(num_threads(num_sequences), thread_name_prefix=THREAD_NAME)
        self._gauges = gauges
        self._timeout_s = timeout_s

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in one of the threads; its exceptions pass through.

        After a cancellation or a timeout the caller no longer waits, but the call runs to its end.

        Raises:
            EnvironmentFailedError: when the call takes too long, with the line it is at.
        """
        threads: list[int] = []

        def run() -> _Result:
            threads.append(threading.get_ident())
            return function()

        started_s = time.monotonic()
        future = asyncio.get_running_loop().run_in_executor(self._pool, run)
        try:
            with tracing.child("environment"):
                done, _ = await asyncio.wait({future}, timeout=self._timeout_s)
        finally:
            future.cancel()  # has no effect on a finished call
        self._gauges.observe_environment(time.monotonic() - started_s)
        if not done:
            self._gauges.count_environment_failure(EnvironmentFault.TIMEOUT)
            raise EnvironmentFailedError(self._timeout_failure(threads[0] if threads else None))
        try:
            return future.result()
        except EnvironmentFailedError as error:
            by_sandbox = isinstance(error.__cause__, SandboxError)
            fault = EnvironmentFault.SANDBOX if by_sandbox else EnvironmentFault.RAISED
            self._gauges.count_environment_failure(fault)
            raise

    def close(self) -> None:
        """Take no further call; do not wait for running ones, which may block for ever."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timeout_failure(self, thread: int | None) -> Failure:
        """Describe a call that took too long; thread: where it runs, None if it did not start."""
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


def _wrong_value(
    cause: FailureCause, function: Callable[..., object], value: object, wanted: str
) -> EnvironmentFailedError:
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(function, "__code__", None)
    kind = "" if value is None or isinstance(value, float) else f"{type(value).__name__} "
    message = one_line(f"{name} must return {wanted}, got {kind}{reprlib.repr(value)}")
    location = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return EnvironmentFailedError(Failure(cause=cause, message=message, location=location))


def _environment_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost `file:line` in the folder of the first file that our folders call.

    Deeper frames are libraries that the environment uses; their lines help its author less.
    """
    ours = itertools.dropwhile(lambda frame: not _is_ours(frame), frames)
    theirs = [frame for frame in ours if not _is_ours(frame)]
    beside = [
        frame for frame in theirs if Path(frame.filename).parent == Path(theirs[0].filename).parent
    ]
    return f"{beside[-1].filename}:{beside[-1].lineno}" if beside else ""


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).parent in _OUR_FOLDERS
