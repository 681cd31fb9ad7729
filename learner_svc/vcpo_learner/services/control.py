"""`ControlService`: reports the run's signals, and accepts throttle and drain commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vcpo.control.limits import lag_change_kind, lag_change_sentence
from vcpo.wire.errors import check_id
from vcpo.wire.phase import phase_to_message
from vcpo.wire.v1 import control_pb2, control_pb2_grpc
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.telemetry.signals import SignalWindow


@dataclass(slots=True, kw_only=True, eq=False)
class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Lets the operator or the local host observe and limit the run."""

    dispatcher: Dispatcher
    signals: SignalWindow
    drain: Callable[[str], None]
    event: Callable[[str, str], None]

    async def GetSignals(  # noqa: N802 - named by the contract
        self, request: control_pb2.GetSignalsRequest, context: Any
    ) -> control_pb2.Signals:
        return self.signals.message()

    async def SetThrottle(  # noqa: N802 - named by the contract
        self, request: control_pb2.SetThrottleRequest, context: Any
    ) -> control_pb2.SetThrottleResponse:
        """Set the lag limit for new work; return the limit that now applies.

        A change is an event and a line in the log, with the reason that the host gave.
        """
        before = self.dispatcher.lag_limit_steps
        lag_steps = self.dispatcher.throttle(request.lag_limit_steps)
        if lag_steps != before:
            sentence = lag_change_sentence(before, lag_steps, request.reason)
            self.event(lag_change_kind(before, lag_steps), sentence)
        return control_pb2.SetThrottleResponse(lag_limit_steps=lag_steps)

    async def Drain(  # noqa: N802 - named by the contract
        self, request: control_pb2.DrainRequest, context: Any
    ) -> control_pb2.DrainResponse:
        self.drain(request.reason or "asked for")
        return control_pb2.DrainResponse(phase=phase_to_message(self.dispatcher.phase))

    async def ReleaseWorker(  # noqa: N802 - named by the contract
        self, request: control_pb2.ReleaseWorkerRequest, context: Any
    ) -> control_pb2.ReleaseWorkerResponse:
        """End all leases of a worker that died; its name is free again."""
        check_id("worker_id", request.worker_id)
        released = self.dispatcher.release(request.worker_id, ())
        return control_pb2.ReleaseWorkerResponse(num_released=released)
