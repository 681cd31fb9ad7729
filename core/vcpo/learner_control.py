"""Client of the learner's control service, and the conversion of its message to `RunSignals`.

The local host and the operator both use it: they poll signals, call `vcpo.control.decide` and apply
the decision, the one to processes and the other to pods.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import Message

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.signals import RunSignals, WorkerSignals
from vcpo.judgement import no_update_notice
from vcpo.wire.limits import CALL_TIMEOUT_S
from vcpo.wire.phase import phase_from_message
from vcpo.wire.v1 import control_pb2, control_pb2_grpc

SIGNALS_TIMEOUT_S = 5.0
"""Timeout of a request for signals."""
_RECENT_S = 600.0
"""A worker that was set aside is shown for so long; its replacement has started by then."""


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
        """Ask the learner to finish its step, write a checkpoint and exit."""
        request = control_pb2.DrainRequest(reason=reason)
        await self._control.Drain(request, timeout=CALL_TIMEOUT_S)

    async def release_all_leases(self, worker_id: str) -> int:
        """Release all leases of a worker that died, and return their number."""
        request = control_pb2.ReleaseWorkerRequest(worker_id=worker_id)
        response = await self._control.ReleaseWorker(request, timeout=CALL_TIMEOUT_S)
        return response.num_released

    async def reopen(self, channel: grpc.aio.Channel) -> None:
        """Close the channel and go on over another one."""
        await self._channel.close()
        self._channel, self._control = channel, control_pb2_grpc.ControlServiceStub(channel)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def call_failure(error: grpc.aio.AioRpcError | ValueError) -> str:
    """Return why a call failed, as a clause on one line: the status, and what it says of itself."""
    if isinstance(error, ValueError):
        return str(error)
    details = " ".join((error.details() or "").split())
    status = error.code().name.lower().replace("_", " ")
    return f"{status}: {details}" if details else status


def optional_field(message: Message, name: str) -> Any:
    """Return the value of an optional field of a message; None if it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def run_signals(message: control_pb2.Signals) -> RunSignals:
    """Convert the learner's message; values that it has not measured yet are None.

    Raises:
        ValueError: naming the field, if a value is out of range.
    """
    num_skipped = message.skipped_steps_in_a_row
    has_never_updated = 0 < message.total_steps <= num_skipped
    return RunSignals(
        phase=phase_from_message(message.phase),
        step=message.step,
        policy_version=message.policy_version,
        ess_ratio=optional_field(message, "ess_ratio"),
        ess_ratio_mean=optional_field(message, "ess_ratio_mean"),
        ess_ratio_low=optional_field(message, "ess_ratio_low"),
        on_policy_ess_ratio=message.on_policy_ess_ratio,
        learning_rate=optional_field(message, "learning_rate"),
        learning_rate_schedule=optional_field(message, "learning_rate_schedule"),
        learning_rate_scale=optional_field(message, "learning_rate_scale"),
        learning_rate_backoff=optional_field(message, "learning_rate_backoff"),
        warning_score=optional_field(message, "warning_score"),
        warning_level=_warning_level(optional_field(message, "warning_level")),
        rollback=message.rollback,
        reward_mean=optional_field(message, "reward_mean"),
        accuracy=message.evaluations[-1].accuracy if message.evaluations else None,
        cut_responses_ratio=optional_field(message, "cut_responses_ratio"),
        equal_groups_ratio=optional_field(message, "equal_groups_ratio"),
        prompt_tokens_mean=optional_field(message, "prompt_tokens_mean"),
        lag_p50=optional_field(message, "lag_p50"),
        lag_max=optional_field(message, "lag_max"),
        lag_limit_steps=message.lag_limit_steps,
        buffered=message.trajectories.buffered,
        in_flight=message.trajectories.in_flight,
        batch_trajectories=message.batch_trajectories,
        learner_idle_ratio=message.learner_idle_ratio,
        consumed_per_s=message.consumed_trajectories_per_second,
        tokens_per_s=message.generated_tokens_per_second,
        ready_workers=dict(Counter(worker.rollout_group for worker in message.workers)),
        workers={worker.worker_id: _worker(worker) for worker in message.workers},
        failure=message.failure,
        failures_in_a_row=message.failures_in_a_row,
        latest_generation_failure=message.failures[0].message if message.failures else "",
        set_aside=_set_aside_notice(message),
        mismatch=message.mismatch,
        no_update=no_update_notice(num_skipped, message.skip_reason, is_all=has_never_updated),
        has_never_updated=has_never_updated,
        collapse=message.collapse,
        lost_changes=message.lost_changes,
        since_step_s=message.seconds_since_step,
    )


def _worker(message: control_pb2.Worker) -> WorkerSignals:
    return WorkerSignals(
        in_flight=message.in_flight_trajectories,
        silent_s=message.seconds_since_seen,
        accepted=message.accepted_trajectories,
    )


def _set_aside_notice(message: control_pb2.Signals) -> str:
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
