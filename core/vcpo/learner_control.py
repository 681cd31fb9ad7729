"""Client of the learner's control service, and the conversion of its message to `RunSignals`.

The local host and the operator both use it: they poll signals, call `vcpo.control.decide` and apply
the decision, the one to processes and the other to pods.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import grpc

from vcpo.control.signals import RunSignals, WorkerSignals, checked_signals
from vcpo.records.step_record import record_from_json
from vcpo.wire.limits import CALL_TIMEOUT_S
from vcpo.wire.phase import phase_from_message
from vcpo.wire.v1 import control_pb2, control_pb2_grpc

SIGNALS_TIMEOUT_S = 5.0


class LearnerControl:
    """A host's connection to the learner of one run: its signals, and commands to it.

    It outlives the learner's processes: the last known signals stay while the learner does not
    answer, or answers with values that are out of range. Every command raises
    `grpc.aio.AioRpcError` if the learner does not answer in time.

    clock: seconds; the age of signals is counted by it.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failure: grpc.aio.AioRpcError | ValueError | None = None
        """Why the last poll brought no signals; None if it did."""
        self._channel = channel
        self._control = control_pb2_grpc.ControlServiceStub(channel)
        self._clock = clock
        self._latest: RunSignals | None = None
        self._asked_s = 0.0

    async def poll(self, *, timeout_s: float = SIGNALS_TIMEOUT_S) -> RunSignals | None:
        """Request signals and return them; None if none came, and `failure` says why."""
        asked_s, request = self._clock(), control_pb2.GetSignalsRequest()
        try:
            message = await self._control.GetSignals(request, timeout=timeout_s)
            self._latest = run_signals(message)
        except (grpc.aio.AioRpcError, ValueError) as error:
            self.failure = error
            return None
        self.failure, self._asked_s = None, asked_s
        return self._latest

    def last_known(self) -> RunSignals | None:
        """Return the last signals with their age, no longer fresh; None before the first."""
        if self._latest is None:
            return None
        age_s, is_silent = self._clock() - self._asked_s, self.failure is not None
        return replace(self._latest, age_s=age_s, is_fresh=False, is_silent=is_silent)

    async def throttle(self, lag_limit_steps: int, reason: str) -> None:
        """Set the lag limit, in policy versions; it stays in force until it is replaced.

        reason: Why, as a clause without a full stop.
        """
        request = control_pb2.SetThrottleRequest(lag_limit_steps=lag_limit_steps, reason=reason)
        await self._control.SetThrottle(request, timeout=CALL_TIMEOUT_S)

    async def drain(self, reason: str) -> None:
        request = control_pb2.DrainRequest(reason=reason)
        await self._control.Drain(request, timeout=CALL_TIMEOUT_S)

    async def release_all_leases(self, worker_id: str) -> int:
        """Release all leases of a worker that died, and return their number."""
        request = control_pb2.ReleaseWorkerRequest(worker_id=worker_id)
        response = await self._control.ReleaseWorker(request, timeout=CALL_TIMEOUT_S)
        return response.num_released

    async def reopen(self, channel: grpc.aio.Channel) -> None:
        await self._channel.close()
        self._channel, self._control = channel, control_pb2_grpc.ControlServiceStub(channel)

    async def close(self) -> None:
        await self._channel.close()


def call_failure(error: grpc.aio.AioRpcError | ValueError) -> str:
    """Return why a call failed, as a clause on one line: the status, and what it says of itself."""
    if isinstance(error, ValueError):
        return str(error)
    details = " ".join((error.details() or "").split())
    status = error.code().name.lower().replace("_", " ")
    return f"{status}: {details}" if details else status


_STATE: Final = (
    "policy_version",
    "lag_limit_steps",
    "batch_trajectories",
    "buffered",
    "in_flight",
    "learner_idle_ratio",
    "consumed_per_s",
    "since_step_s",
    "failure",
    "failures_in_a_row",
    "generation_failure",
    "set_aside",
    "mismatch",
    "rollback",
    "collapse",
    "lost_changes",
)
"""Fields that message and signals have under one name."""


def run_signals(message: control_pb2.Signals) -> RunSignals:
    """Convert the learner's message."""
    return checked_signals(
        {
            **{name: getattr(message, name) for name in _STATE},
            "last": record_from_json(message.last_step) if message.last_step else None,
            "phase": phase_from_message(message.phase),
            "accuracy": message.accuracy if message.HasField("accuracy") else None,
            "ready_workers": Counter(worker.rollout_group for worker in message.workers),
            "workers": {
                worker.worker_id: WorkerSignals(
                    in_flight=worker.in_flight, silent_s=worker.silent_s, accepted=worker.accepted
                )
                for worker in message.workers
            },
        }
    )
