"""`ControlService`: signals out, throttle and drain in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vcpo.wire.phase import phase_to_message
from vcpo.wire.v1 import control_pb2, control_pb2_grpc
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.telemetry.signals import SignalWindow


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Lets whoever steers the run see and limit it."""

    def __init__(
        self, *, dispatcher: Dispatcher, signals: SignalWindow, drain: Callable[[str], None]
    ) -> None:
        self._dispatcher = dispatcher
        self._signals = signals
        self._drain = drain

    async def GetSignals(  # noqa: N802 - named by the contract
        self, request: control_pb2.GetSignalsRequest, context: Any
    ) -> control_pb2.Signals:
        """Report the run as it is now."""
        return self._signals.message()

    async def SetThrottle(  # noqa: N802 - named by the contract
        self, request: control_pb2.SetThrottleRequest, context: Any
    ) -> control_pb2.SetThrottleResponse:
        """Set the lag bound for new work, and say which one is now in force."""
        lag_steps = self._dispatcher.throttle(request.admission_lag_steps)
        return control_pb2.SetThrottleResponse(admission_lag_steps=lag_steps)

    async def Drain(  # noqa: N802 - named by the contract
        self, request: control_pb2.DrainRequest, context: Any
    ) -> control_pb2.DrainResponse:
        """Ask for an orderly end; the phase tells how far it is."""
        self._drain(request.reason or "asked for")
        return control_pb2.DrainResponse(phase=phase_to_message(self._dispatcher.phase))
