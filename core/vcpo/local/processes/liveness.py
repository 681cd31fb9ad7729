"""Whether the processes of a run answer: a process may live and hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vcpo.control.supervision import is_hung
from vcpo.local.processes.child import ChildProcess
from vcpo.wire.limits import CHANNEL_OPTIONS

_UNANSWERED = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}


async def answers(child: ChildProcess, timeout_s: float) -> bool:
    """Whether a process answers a health check, with whatever; False before it serves."""
    ready = child.ready
    if ready is None:
        return False
    address = f"127.0.0.1:{ready.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _UNANSWERED
    return True


class Liveness:
    """Since when each process has left questions unanswered.

    Time counts from the first question without an answer, so that a host which slept itself, or
    asks seldom, takes nobody for hung.
    """

    def __init__(
        self, *, startup_deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._startup_deadline_s = startup_deadline_s
        self._clock = clock
        self._unanswered_since_s: dict[tuple[int, bool], float] = {}
        """By process id and whether the process had started to serve."""

    def note(self, child: ChildProcess, *, answered: bool) -> None:
        """Note whether a process answered a question just now."""
        if answered:
            self._unanswered_since_s.pop(_key(child), None)
        else:
            self._unanswered_since_s.setdefault(_key(child), self._clock())

    def silent_s(self, child: ChildProcess) -> float:
        """How long a process has not answered; 0 when it answered the last question."""
        now_s = self._clock()
        return now_s - self._unanswered_since_s.get(_key(child), now_s)

    def is_hung(self, child: ChildProcess) -> bool:
        """Whether a process is to be killed and replaced."""
        return is_hung(
            silent_s=self.silent_s(child),
            has_started=child.ready is not None,
            startup_deadline_s=self._startup_deadline_s,
        )

    def retain(self, children: Iterable[ChildProcess]) -> None:
        """Forget processes that have ended."""
        kept = {child.process.pid for child in children}
        self._unanswered_since_s = {
            key: since_s for key, since_s in self._unanswered_since_s.items() if key[0] in kept
        }


def _key(child: ChildProcess) -> tuple[int, bool]:
    return child.process.pid, child.ready is not None
