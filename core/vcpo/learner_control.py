"""Steering a run from outside: the learner's signals as `vcpo.control` wants them, and the calls.

The local host and the operator both stand on this: they poll signals, let `vcpo.control.decide`
decide, and apply the decision, each to its own kind of workers.
"""

from __future__ import annotations

from collections import Counter

import grpc

from vcpo.control.signals import RunSignals
from vcpo.wire.limits import CALL_TIMEOUT_S
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, work_pb2, work_pb2_grpc

SIGNALS_TIMEOUT_S = 5.0
"""How long a learner may take to tell its signals."""


class LearnerControl:
    """Calls to the learner of one run by whoever steers it.

    Every call raises `grpc.aio.AioRpcError` when the learner cannot be reached in time.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._control = control_pb2_grpc.ControlServiceStub(channel)
        self._work = work_pb2_grpc.WorkServiceStub(channel)

    async def signals(self, *, timeout_s: float = SIGNALS_TIMEOUT_S) -> control_pb2.Signals:
        """The run as the learner sees it now."""
        request = control_pb2.GetSignalsRequest()
        return await self._control.GetSignals(request, timeout=timeout_s)

    async def throttle(self, admission_lag_steps: int, reason: str) -> None:
        """Set the lag bound for new work; it stays in force until replaced."""
        request = control_pb2.SetThrottleRequest(
            admission_lag_steps=admission_lag_steps, reason=reason
        )
        await self._control.SetThrottle(request, timeout=CALL_TIMEOUT_S)

    async def drain(self, reason: str) -> None:
        """Ask the run to end in good order."""
        request = control_pb2.DrainRequest(reason=reason)
        await self._control.Drain(request, timeout=CALL_TIMEOUT_S)

    async def release_all_leases(self, worker_id: str) -> int:
        """Hand back for a worker that was seen to die; returns how many leases it held."""
        request = work_pb2.ReleaseRequest(worker_id=worker_id)
        response = await self._work.Release(request, timeout=CALL_TIMEOUT_S)
        return response.num_released


def run_signals(message: control_pb2.Signals, *, age_s: float) -> RunSignals:
    """Read the learner's message; what it has not measured yet is None.

    Raises:
        ValueError: naming the field, when a value is out of its range.
    """

    def known(field: str) -> bool:
        return message.HasField(field)  # type: ignore[arg-type]  # the stub wants literals

    return RunSignals(
        step=message.step,
        policy_version=message.policy_version,
        ess_ratio_mean=message.ess_ratio_mean if known("ess_ratio_mean") else None,
        ess_ratio_low=message.ess_ratio_low if known("ess_ratio_low") else None,
        on_policy_ess_ratio=message.on_policy_ess_ratio,
        lag_p50=message.lag_p50 if known("lag_p50") else None,
        lag_max=message.lag_max if known("lag_max") else None,
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
