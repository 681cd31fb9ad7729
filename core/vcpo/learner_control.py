"""Client of the learner's control service, and the conversion of its signals for `vcpo.control`.

The local host and the operator both use it: they poll signals, call `vcpo.control.decide` and apply
the decision, the one to processes and the other to pods.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import grpc
from google.protobuf.message import Message

from vcpo.algo import WarningLevel
from vcpo.control.signals import RunSignals
from vcpo.wire.limits import CALL_TIMEOUT_S
from vcpo.wire.v1 import control_pb2, control_pb2_grpc

SIGNALS_TIMEOUT_S = 5.0
"""Timeout of a request for signals."""
_RECENT_S = 600.0
"""A worker that was set aside is shown for so long; its replacement has started by then."""


class LearnerControl:
    """Calls of a host to the learner of one run.

    Every call raises `grpc.aio.AioRpcError` if the learner does not answer in time.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._control = control_pb2_grpc.ControlServiceStub(channel)

    async def signals(self, *, timeout_s: float = SIGNALS_TIMEOUT_S) -> control_pb2.Signals:
        """Return the current signals of the run."""
        request = control_pb2.GetSignalsRequest()
        return await self._control.GetSignals(request, timeout=timeout_s)

    async def throttle(self, admission_lag_steps: int, reason: str) -> None:
        """Set the lag limit, in policy versions; it stays in force until it is replaced.

        reason: Why, as a clause without a full stop.
        """
        request = control_pb2.SetThrottleRequest(
            admission_lag_steps=admission_lag_steps, reason=reason
        )
        await self._control.SetThrottle(request, timeout=CALL_TIMEOUT_S)

    async def drain(self, reason: str) -> None:
        """Ask the learner to finish its step, write a checkpoint and exit."""
        request = control_pb2.DrainRequest(reason=reason)
        await self._control.Drain(request, timeout=CALL_TIMEOUT_S)

    async def release_all_leases(self, worker_id: str) -> int:
        """Release all leases of a worker that died, and return their number."""
        request = control_pb2.ReleaseWorkerRequest(worker_id=worker_id)
        response = await self._control.ReleaseWorker(request, timeout=CALL_TIMEOUT_S)
        return response.num_released


def call_failure(error: grpc.aio.AioRpcError) -> str:
    """Return why a call failed, as a clause on one line: the status, and what it says of itself."""
    details = " ".join((error.details() or "").split())
    status = error.code().name.lower().replace("_", " ")
    return f"{status}: {details}" if details else status


def optional_field(message: Message, name: str) -> Any:
    """Return the value of an optional field of a message; None if it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def run_signals(message: control_pb2.Signals, *, age_s: float) -> RunSignals:
    """Convert the learner's message; values that it has not measured yet are None.

    Raises:
        ValueError: naming the field, if a value is out of range.
    """
    return RunSignals(
        step=message.step,
        policy_version=message.policy_version,
        ess_ratio_mean=optional_field(message, "ess_ratio_mean"),
        ess_ratio_low=optional_field(message, "ess_ratio_low"),
        on_policy_ess_ratio=message.on_policy_ess_ratio,
        warning_score=optional_field(message, "warning_score"),
        warning_level=_warning_level(optional_field(message, "warning_level")),
        rollback=message.rollback,
        lag_p50=optional_field(message, "lag_p50"),
        lag_max=optional_field(message, "lag_max"),
        buffered=message.trajectories.buffered,
        in_flight=message.trajectories.in_flight,
        batch_trajectories=message.batch_trajectories,
        admission_lag_steps=message.admission_lag_steps,
        learner_idle_ratio=message.learner_idle_ratio,
        produced_per_s=message.produced_trajectories_per_second,
        consumed_per_s=message.consumed_trajectories_per_second,
        ready_workers=dict(Counter(worker.rollout_group for worker in message.workers)),
        age_s=age_s,
    )


def set_aside_notice(message: control_pb2.Signals) -> str:
    """Return which workers the learner has just set aside, in a sentence; empty if none."""
    recent = [one for one in message.set_aside if one.seconds_since < _RECENT_S]
    if not recent:
        return ""
    last = recent[0]
    how_many = f"{len(recent)} workers were set aside in the last {_RECENT_S / 60:.0f} minutes"
    who = f"{last.worker_id} ({last.cause}): {last.message}."
    return (
        f"A worker was set aside, {who}"
        if len(recent) == 1
        else f"{how_many}; the last one is {who}"
    )


def _warning_level(name: str | None) -> WarningLevel | None:
    if name is None:
        return None
    try:
        return WarningLevel(name)
    except ValueError as error:
        known = ", ".join(WarningLevel)
        raise ValueError(f"warning_level must be one of {known}, not '{name}'") from error
