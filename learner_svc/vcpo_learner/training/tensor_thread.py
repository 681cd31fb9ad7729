"""The thread that computes with the model's tensors, and the watch over it.

```
event loop      run(work) ---> looks every second: does it run for longer than such work may?
tensor thread        work ............................................ the end, or never
```

A thread that never returns cannot be ended, and while it runs nothing else may touch the tensors.
So the process has to end, and its host starts it again from the last checkpoint and the redo log. A
learner that waits for responses is not at work: nothing is timed then.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Final, TypeVar

from vcpo.api import VCPORunSpec
from vcpo.control.supervision import LEAST_LIMIT_S, REMEMBERED, work_limit_s
from vcpo_learner.clock import Clock

_Result = TypeVar("_Result")

_LOOK_S = 1.0
_AFTER_COLLECTIVES_S: Final = 60.0
"""How much later than a collective's own timeout, which names the rank that is lost."""


class TensorWork(StrEnum):
    """What the thread does, as messages say it."""

    GRADIENT = "the gradient of a batch"
    STEP = "the step of the optimizer"
    WEIGHTS = "the comparison of the weights with those published before"
    CHECKPOINT = "the copy of a checkpoint"
    RESTORE = "the return to a checkpoint"


class StuckWorkError(Exception):
    """The tensor thread does not return; the process must end without waiting for it.

    stack: frames of the thread.
    """

    def __init__(self, message: str, stack: str) -> None:
        super().__init__(message)
        self.where = f"Traceback (most recent call last):\n{stack}{type(self).__name__}: {message}"
        """Place in the code where the thread stands, as the log of a crash shows it."""


class TensorThread:
    """Runs work on the model's tensors, one piece after another. Owner: the event loop."""

    def __init__(
        self, spec: VCPORunSpec, clock: Clock, report_stuck: Callable[[StuckWorkError], None]
    ) -> None:
        """Start no thread before there is work.

        report_stuck: called once work is stuck, before its error is raised.
        """
        self._first_s = float(spec.startup_deadline_seconds)
        learner = spec.learner
        collectives_s = learner.collective_timeout_seconds + _AFTER_COLLECTIVES_S
        self._least_s = LEAST_LIMIT_S
        if learner.ranks > 1:
            self._least_s = max(LEAST_LIMIT_S, collectives_s)
        self._clock = clock
        self._report_stuck = report_stuck
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensors")
        self._durations_s: defaultdict[TensorWork, deque[float]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED)
        )
        self._thread_id: int | None = None

    async def run(self, kind: TensorWork, work: Callable[[], _Result]) -> _Result:
        """Do work in the thread; return its result.

        Raises:
            StuckWorkError: if it takes far longer than such work did; it may still run.
            Exception: the error of the work.
        """
        started_s = self._clock()
        limit_s = work_limit_s(
            tuple(self._durations_s[kind]), first_s=self._first_s, least_s=self._least_s
        )
        working = asyncio.get_running_loop().run_in_executor(self._pool, self._run_on_thread, work)
        while not working.done():
            if self._clock() - started_s > limit_s:
                error = StuckWorkError(self._message(kind, limit_s), self._stack())
                self._report_stuck(error)
                raise error
            await asyncio.wait([working], timeout=_LOOK_S)
        self._durations_s[kind].append(self._clock() - started_s)
        return working.result()

    def shutdown(self) -> None:
        """End the thread after its work."""
        self._pool.shutdown()

    def _run_on_thread(self, work: Callable[[], _Result]) -> _Result:
        self._thread_id = threading.get_ident()
        return work()

    def _message(self, kind: TensorWork, limit_s: float) -> str:
        earlier = self._durations_s[kind]
        usual = (
            f"the longest of the last {len(earlier)} took {max(earlier):.3g} s"
            if earlier
            else "none has ended since the start"
        )
        return (
            f"the tensor thread hangs: {kind} has not ended within {limit_s:.0f} s; {usual}. The"
            " log shows where the thread stands"
        )

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread_id or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
