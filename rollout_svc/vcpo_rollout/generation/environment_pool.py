"""Runs the environment's code in its own threads, and names its failures.

The environment is user code: it may block for minutes, raise anything and return anything. asyncio
has few threads of its own, in which weights are read, verified and written; a slow environment
would block them.
"""

import asyncio
import contextlib
import inspect
import itertools
import math
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from vcpo.metrics.label_values import EnvironmentFault
from vcpo.wire.failures import Failure, FailureCause, one_line
from vcpo.wire.limits import MAX_ID_CHARACTERS, MAX_REWARD_PARTS
from vcpo_rollout.gauges import RolloutGauges

_Result = TypeVar("_Result")

MOST_THREADS: Final = 256
"""Largest number of calls at once; others wait. Each call may start costly work of its own."""
SCORE: Final = "score"
"""Part of a reward that is the reward; the others are only shown."""
THREAD_NAME: Final = "environment"
_ROOT: Final = Path(__file__).parents[1]
_OUR_FOLDERS: Final = (_ROOT, _ROOT / "generation", _ROOT / "engines")
"""Folders whose code calls an environment, or a chat template for it."""
_MAKER: Final = _ROOT / "environments" / "environment.py"
"""The file whose code makes an environment."""


class EnvironmentFailedError(Exception):
    """The environment's code failed; the worker reports the prompt as failed, with the cause.

    It is no RuntimeError: contextlib would take one that a StopIteration caused for its own.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


@contextlib.contextmanager
def environment_errors(cause: FailureCause) -> Iterator[None]:
    """Convert any exception of the environment's code, SystemExit and KeyboardInterrupt included.

    Raises: EnvironmentFailedError with `cause`, the exception, and the environment's line.
    """
    try:
        yield
    except EnvironmentFailedError:
        raise
    except BaseException as error:  # in a thread of ours nothing else ends the process
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


_loops: list[asyncio.AbstractEventLoop] = []
_making_loop = threading.Lock()


def awaited(value: object) -> object:
    """Return what a reward function returned; what an `async def` returned is awaited.

    All are awaited on one loop of their own, because a client that a user's module holds belongs
    to the loop that used it first. The calling thread waits.

    Raises: EnvironmentFailedError when the coroutine raises.
    """
    if not inspect.iscoroutine(value):
        return value

    async def finish() -> object:
        with environment_errors(FailureCause.REWARD):
            return await value

    with _making_loop:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            name = f"{THREAD_NAME}-loop"
            threading.Thread(target=_loops[0].run_forever, name=name, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(finish(), _loops[0]).result()


def check_judgement(value: object, function: Callable[..., object]) -> Judgement:
    """Return a reward; of parts by name the `score`, beside which no text is a part, or their sum.

    Raises: EnvironmentFailedError as `check_reward` and `awaited`, and for too many parts, or names
        that are no text of 1 to `MAX_ID_CHARACTERS` printable characters.
    """
    value = awaited(value)
    if not isinstance(value, Mapping):
        return Judgement(reward=check_reward(value, function), parts={})
    names_fit = all(
        isinstance(name, str) and 1 <= len(name) <= MAX_ID_CHARACTERS and name.isprintable()
        for name in value
    )
    if not names_fit or not 1 <= len(value) <= MAX_REWARD_PARTS:
        wanted = f"a number, or 1 to {MAX_REWARD_PARTS} numbers by name"
        raise _wrong_value(FailureCause.TYPE, function, value, wanted)
    if SCORE not in value:
        parts = {name: check_reward(part, function) for name, part in value.items()}
        return Judgement(reward=check_reward(sum(parts.values()), function), parts=parts)
    reward, parts = check_reward(value[SCORE], function), {}
    for name, part in value.items():
        with contextlib.suppress(EnvironmentFailedError):
            parts[name] = check_reward(part, function)
    return Judgement(reward=reward, parts={k: v for k, v in parts.items() if k != SCORE})


class HungCallsError(RuntimeError):
    """Too many calls of the environment hang in this process."""


class EnvironmentThreads:
    """Threads for the calls of `num_sequences` concurrent sequences; each starts when needed.

    A call that takes longer than it may is left behind in its thread. There are two threads for
    each call at once, so as many calls may hang as are made at once; with more, the process must
    end.

    timeout_s: limit of one call, and of its wait for a free thread; None sets no limit.
    """

    def __init__(
        self, num_sequences: int, *, gauges: RolloutGauges, timeout_s: float | None = None
    ) -> None:
        self._most = min(num_sequences, MOST_THREADS)
        self._pool = ThreadPoolExecutor(2 * self._most, thread_name_prefix=THREAD_NAME)
        self._gauges = gauges
        self._timeout_s = timeout_s
        self._left: dict[Future[Any], float] = {}
        """Running calls that nobody waits for any more, and when their time is over."""

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in one of the threads; its exceptions pass through.

        After a cancellation or a timeout the caller no longer waits, but the call runs to its end.

        Raises:
            EnvironmentFailedError: when the call takes too long, with the line it is at.
        """
        begun: list[tuple[int, float]] = []

        def run() -> _Result:
            begun.append((threading.get_ident(), time.monotonic()))
            return function()

        started_s = time.monotonic()
        running = self._pool.submit(run)
        future = asyncio.wrap_future(running)
        try:
            done, _ = await asyncio.wait({future}, timeout=self._timeout_s)
            if not done and begun and self._timeout_s is not None:  # it waited for a thread
                left_s = begun[0][1] + self._timeout_s - time.monotonic()
                done, _ = await asyncio.wait({future}, timeout=max(0.0, left_s))
        finally:
            future.cancel()  # has no effect on a finished call, or on one that has begun
            if not running.done() and self._timeout_s is not None:
                self._left[running] = started_s + self._timeout_s
        self._gauges.metrics.environment_s.observe(time.monotonic() - started_s)
        if not done:
            self._count_hung()
            self._gauges.metrics.environment_failures.labels(EnvironmentFault.TIMEOUT).inc()
            raise EnvironmentFailedError(self._timeout_failure([thread for thread, _ in begun]))
        try:
            return future.result()
        except EnvironmentFailedError:
            self._gauges.metrics.environment_failures.labels(EnvironmentFault.RAISED).inc()
            raise

    def check(self) -> None:
        """Check that hung calls leave this process able to work.

        Raises:
            HungCallsError: if too many hang.
        """
        if (num_hung := self._count_hung()) > self._most:
            raise HungCallsError(
                f"{num_hung} calls have not returned after {self._limit}: a process may leave"
                f" {self._most} behind. Give the environment's own calls, such as those of a"
                " client, a timeout"
            )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count_hung(self) -> int:
        now_s = time.monotonic()
        self._left = {call: end_s for call, end_s in self._left.items() if not call.done()}
        num_hung = sum(end_s <= now_s for end_s in self._left.values())
        self._gauges.metrics.environment_hung_calls.set(num_hung)
        return num_hung

    @property
    def _limit(self) -> str:
        return f"{self._timeout_s:g} s (half of lease.timeoutSeconds)"

    def _timeout_failure(self, threads: Sequence[int]) -> Failure:
        """Describe a call that took too long; threads: that in which it runs, if it started."""
        if not threads:
            message = f"no thread was free within {self._limit}: earlier calls have not returned"
            return Failure(cause=FailureCause.TIMEOUT, message=message)
        stack = traceback.extract_stack(sys._current_frames().get(threads[0]))
        return Failure(
            cause=FailureCause.TIMEOUT,
            message=f"a call has not returned after {self._limit}",
            location=_environment_line(stack),
        )


def _wrong_value(
    cause: FailureCause, function: Callable[..., object], value: object, wanted: str
) -> EnvironmentFailedError:
    while isinstance(function, partial):
        function = function.func
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
    path = Path(frame.filename)
    return path.parent in _OUR_FOLDERS or path == _MAKER
