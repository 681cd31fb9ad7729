"""Detection of hung processes: processes that run and do not answer health checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vcpo.control.supervision import is_hung
from vcpo.local.processes.child import ChildProcess
from vcpo.wire.limits import CHANNEL_OPTIONS

_UNANSWERED = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}


async def answers_health_check(child: ChildProcess, timeout_s: float) -> bool:
    """Return whether a process answers a health check, with any status; False before it serves."""
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
    """Time since which each process has not answered health checks.

    The time counts from the first unanswered check. A host that was suspended itself, or checks
    rarely, therefore does not treat a process as hung.
    """

    def __init__(
        self, *, startup_deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._startup_deadline_s = startup_deadline_s
        self._clock = clock
        self._unanswered_since_s: dict[tuple[int, bool], float] = {}
        """Time of the first unanswered check, by process id and whether the process serves."""

    def record(self, child: ChildProcess, *, answered: bool) -> None:
        """Record whether a process answered the current health check."""
        if answered:
            self._unanswered_since_s.pop(_key(child), None)
        else:
            self._unanswered_since_s.setdefault(_key(child), self._clock())

    def silent_s(self, child: ChildProcess) -> float:
        """Return the seconds since the first unanswered check; 0 if the last was answered."""
        now_s = self._clock()
        return now_s - self._unanswered_since_s.get(_key(child), now_s)

    def is_hung(self, child: ChildProcess) -> bool:
        """Return whether a process is hung."""
        return is_hung(
            silent_s=self.silent_s(child),
            has_started=child.ready is not None,
            startup_deadline_s=self._startup_deadline_s,
        )

    def retain(self, children: Iterable[ChildProcess]) -> None:
        """Forget all processes but these."""
        kept = {child.process.pid for child in children}
        self._unanswered_since_s = {
            key: since_s for key, since_s in self._unanswered_since_s.items() if key[0] in kept
        }


def _key(child: ChildProcess) -> tuple[int, bool]:
    return child.process.pid, child.ready is not None
