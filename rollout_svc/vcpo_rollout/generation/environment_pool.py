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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from vcpo import tracing
from vcpo.metrics.label_values import EnvironmentFault
from vcpo.wire.failures import Failure, FailureCause, one_line
from vcpo.wire.limits import MAX_ID_CHARACTERS, MAX_REWARD_PARTS
from vcpo_rollout.gauges import RolloutGauges

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
    try:
        reward = float(value)  # type: ignore[arg-type]  # it has __float__
    except Exception as error:  # such as a tensor of several numbers
        raise _wrong_value(FailureCause.TYPE, function, value, "a number") from error
    if not math.isfinite(reward):
        raise _wrong_value(FailureCause.NON_FINITE, function, value, "a finite number")
    return reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What an environment makes of a response."""

    reward: float
    parts: Mapping[str, float]
    """Its parts by name; empty if the environment returned a number alone."""


def check_judgement(value: object, function: Callable[..., object]) -> Judgement:
    """Return a reward, or the sum of its parts if the environment returned those by name.

    Raises: EnvironmentFailedError as `check_reward`, and for too many parts, or names that are no
        text of 1 to `MAX_ID_CHARACTERS` printable characters.
    """
    if not isinstance(value, Mapping):
        return Judgement(reward=check_reward(value, function), parts={})
    names_fit = all(
        isinstance(name, str) and 1 <= len(name) <= MAX_ID_CHARACTERS and name.isprintable()
        for name in value
    )
    if not names_fit or not 1 <= len(value) <= MAX_REWARD_PARTS:
        wanted = f"a number, or 1 to {MAX_REWARD_PARTS} numbers by name"
        raise _wrong_value(FailureCause.TYPE, function, value, wanted)
    parts = {name: check_reward(part, function) for name, part in value.items()}
    return Judgement(reward=check_reward(sum(parts.values()), function), parts=parts)


def num_threads(num_sequences: int) -> int:
    """Return the number of threads for so many concurrent sequences (at least 1), within bounds."""
    return min(num_sequences, MOST_THREADS)


class EnvironmentCalls(Protocol):
    """Where the environment's code runs."""

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function; its exceptions pass through."""
        ...


class HungCallsError(RuntimeError):
    """Too many calls of the environment hang in this process, and others return."""


class _Call(Generic[_Result]):
    """A call of a function on its way through a thread."""

    def __init__(self, function: Callable[[], _Result]) -> None:
        self.future: Future[_Result] = Future()
        self.thread: int | None = None
        """The thread in which it runs; None until it has started."""
        self.is_hung = False
        """Whether its thread was given up."""
        self._function = function

    def run(self) -> None:
        """Run it in this thread, unless nobody waits for it any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        self.thread = threading.get_ident()
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - user code; its caller gets it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class EnvironmentThreads:
    """Threads for the calls of `num_sequences` concurrent sequences; each starts when needed.

    A call that takes longer than it may gives up its thread: another one takes its place, and the
    thread ends when the call returns, if it ever does. As many calls may hang as there are threads.
    With more, one is tried at a time. If a lease succeeds then, the environment works, and this
    process is worn out. If none does, a new process would work no better: a reward server is down.

    The threads do not keep the process from ending.

    timeout_s: limit of one call, including the wait for a free thread; None sets no limit.
    """

    def __init__(
        self, num_sequences: int, *, gauges: RolloutGauges, timeout_s: float | None = None
    ) -> None:
        self._most = num_threads(num_sequences)
        self._gauges = gauges
        self._timeout_s = timeout_s
        self._queue: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards all below."""
        self._num_threads = 0
        """Threads that take calls from the queue."""
        self._num_idle = 0
        """Threads that wait for a call."""
        self._num_queued = 0
        """Calls that no thread has taken."""
        self._num_hung = 0
        self._is_worn_out = False

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in one of the threads; its exceptions pass through.

        After a cancellation or a timeout the caller no longer waits, but the call runs to its end.

        Raises:
            EnvironmentFailedError: when the call takes too long, with the line it is at.
        """
        call = _Call(function)
        started_s = time.monotonic()
        self._submit(call)
        future = asyncio.wrap_future(call.future)
        try:
            with tracing.child("environment"):
                done, _ = await asyncio.wait({future}, timeout=self._timeout_s)
        finally:
            if not future.done():
                self._leave(call, started_s)
            future.cancel()  # has no effect on a finished call
        self._gauges.observe_environment(time.monotonic() - started_s)
        if not done:
            self._gauges.count_environment_failure(EnvironmentFault.TIMEOUT)
            raise EnvironmentFailedError(self._timeout_failure(call.thread))
        try:
            return future.result()
        except EnvironmentFailedError:
            self._gauges.count_environment_failure(EnvironmentFault.RAISED)
            raise

    def record_success(self) -> None:
        """Record that all calls for a lease have returned, so that the environment works."""
        with self._lock:
            self._is_worn_out = self._is_worn_out or self._num_hung > self._most

    def check(self) -> None:
        """Check that hung calls leave this process able to work.

        Raises:
            HungCallsError: if too many hang, and others return.
        """
        if self._is_worn_out:
            raise HungCallsError(
                f"{self._num_hung} calls have not returned after {self._limit}, and others have:"
                f" a process may leave {self._most} behind. Give the environment's own calls, such"
                " as those of a client, a timeout"
            )

    def close(self) -> None:
        """Take no further call; do not wait for running ones, which may block for ever."""
        with self._lock, contextlib.suppress(Empty):
            while (call := self._queue.get_nowait()) is not None:
                self._num_queued -= 1
                call.future.cancel()
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _submit(self, call: _Call[_Result]) -> None:
        """Queue a call; start a thread for it if none is idle and there is room for one."""
        with self._lock:
            self._queue.put(call)
            self._num_queued += 1
            if self._num_idle < self._num_queued:
                self._start_thread()

    def _start_thread(self) -> None:
        """Start a thread if there is room; the lock is held."""
        if self._num_threads >= (1 if self._num_hung > self._most else self._most):
            return
        self._num_threads += 1
        threading.Thread(target=self._run_calls, name=THREAD_NAME, daemon=True).start()

    def _run_calls(self) -> None:
        """Run calls from the queue, in a thread of their own, until one of them hung."""
        while True:
            with self._lock:
                self._num_idle += 1
            call = self._queue.get()
            with self._lock:
                self._num_idle -= 1
                self._num_queued -= call is not None
            if call is None:
                return
            call.run()
            with self._lock:
                if call.is_hung:
                    self._count_hung(-1)
                    return
            del call  # or its result would live as long as the thread waits

    def _leave(self, call: _Call[_Result], started_s: float) -> None:
        """Give up the thread of a call that nobody waits for, once its time is over."""
        if self._timeout_s is None or call.future.cancel():
            return
        left_s = started_s + self._timeout_s - time.monotonic()
        asyncio.get_running_loop().call_later(max(0.0, left_s), self._give_up, call)

    def _give_up(self, call: _Call[_Result]) -> None:
        with self._lock:
            if call.future.done():
                return
            call.is_hung = True
            self._num_threads -= 1
            self._count_hung(1)
            if self._num_idle < self._num_queued:
                self._start_thread()

    def _count_hung(self, change: int) -> None:
        """Count hung calls; the lock is held."""
        self._num_hung += change
        self._gauges.set_hung_calls(self._num_hung)

    @property
    def _limit(self) -> str:
        return f"{self._timeout_s:g} s (half of lease.timeoutSeconds)"

    def _timeout_failure(self, thread: int | None) -> Failure:
        """Describe a call that took too long; thread: where it runs, None if it did not start."""
        if thread is None:
            message = f"no thread was free within {self._limit}: earlier calls have not returned"
            return Failure(cause=FailureCause.TIMEOUT, message=message)
        stack = traceback.extract_stack(sys._current_frames().get(thread))
        return Failure(
            cause=FailureCause.TIMEOUT,
            message=f"a call has not returned after {self._limit}",
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
