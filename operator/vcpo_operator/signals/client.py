"""Connections to learners: signals from them, and commands to them.

By default signals come from the learner itself, over gRPC. They are then of this moment, and the
control loop needs no further system that can be down. `prometheus` is the other source. When none
can be had now, the caller gets the last known signals with their age; `vcpo.control` judges the
age. Commands go over gRPC in either case.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from vcpo.control.signals import RunSignals
from vcpo.learner_control import LearnerControl, call_failure
from vcpo.wire.client import open_channel
from vcpo_operator.decisions.plan import Drain, ReleaseLeases, Throttle
from vcpo_operator.names import RunKey, learner_address
from vcpo_operator.observed.parse import LearnerAccess
from vcpo_operator.observed.records import Cause

_LOGGER = logging.getLogger(__name__)
_STARTING_S = 60.0
"""Time after which a learner that cannot be reached is no longer one that only starts."""

AddressOf = Callable[[RunKey], str]
"""Returns the address of a run's learner: `host:port`."""


class LearnerCommandError(Exception):
    """The learner did not take a command; the next reconcile sends it again if it is needed."""


class SignalSource(Protocol):
    """Where the signals of learners come from."""

    async def fetch_signals(self, key: RunKey, *, period_s: float) -> RunSignals | None:
        """Return fresh signals, else the last known ones with their age; None: none were received.

        period_s: Time between two decisions. A source may answer from memory for half of it.
        """

    def silence(self, key: RunKey) -> Cause | None:
        """Return why the newest request brought no signals; None if it did, or none was made."""

    async def disconnect(self, key: RunKey) -> None:
        """Forget a learner that is gone, and its signals."""

    async def close(self) -> None:
        """Close all connections."""


@dataclass(slots=True, kw_only=True)
class _Connection:
    """The connection to one learner."""

    control: LearnerControl
    opened_s: float
    asked_s: float
    """Time at which signals were asked for last."""
    warned_of: set[str] = field(default_factory=set)
    """Reasons of failures since the last signals that the log has."""


class LearnerConnections:
    """Connections to the learners of all runs. One owner: the operator's event loop."""

    def __init__(
        self, *, clock: Callable[[], float], address_of: AddressOf = learner_address
    ) -> None:
        self._clock = clock
        self._address_of = address_of
        self._access: dict[RunKey, LearnerAccess] = {}
        self._connections: dict[RunKey, _Connection] = {}

    async def set_access(self, key: RunKey, access: LearnerAccess | None) -> None:
        """Call the learner of a run with this access from now on; None: the run is gone."""
        if self._access.get(key) == access:
            return
        self._access.pop(key, None)
        if access is not None:
            self._access[key] = access
        connection = self._connections.get(key)
        if connection is not None:
            await connection.control.reopen(self._open(key))

    async def fetch_signals(self, key: RunKey, *, period_s: float) -> RunSignals | None:
        """Return fresh signals, else the last known ones with their age; None: none were received.

        period_s: A learner that was asked within half of this time is not asked again.
        """
        now_s = self._clock()
        connection = self._connections.get(key)
        if connection is not None and now_s - connection.asked_s < period_s / 2:
            return connection.control.last_known()
        connection = self._connect(key)
        connection.asked_s = now_s
        signals = await connection.control.poll()
        if signals is None:
            self._log_silence(key, connection)
            return connection.control.last_known()
        if connection.warned_of:
            _LOGGER.info("%s: the learner answers again", key)
            connection.warned_of.clear()
        return signals

    def silence(self, key: RunKey) -> Cause | None:
        """Return why the newest call brought no signals; None if it did, or none was made."""
        connection = self._connections.get(key)
        error = None if connection is None else connection.control.failure
        return None if error is None else silence_cause(error)

    async def send(self, key: RunKey, command: Throttle | Drain | ReleaseLeases) -> None:
        control = self._connect(key).control
        try:
            match command:
                case Throttle():
                    await control.throttle(command.lag_limit_steps, command.reason)
                case Drain():
                    await control.drain(command.reason)
                case ReleaseLeases():
                    await control.release_all_leases(command.worker)
        except grpc.aio.AioRpcError as error:
            message = f"the learner took no {type(command).__name__}: {error.details()}"
            raise LearnerCommandError(message) from error

    async def disconnect(self, key: RunKey) -> None:
        connection = self._connections.pop(key, None)
        if connection is not None:
            await connection.control.close()

    async def close(self) -> None:
        for key in list(self._connections):
            await self.disconnect(key)

    def _connect(self, key: RunKey) -> _Connection:
        if key not in self._connections:
            control, now_s = LearnerControl(self._open(key), clock=self._clock), self._clock()
            self._connections[key] = _Connection(control=control, opened_s=now_s, asked_s=now_s)
        return self._connections[key]

    def _open(self, key: RunKey) -> grpc.aio.Channel:
        access = self._access.get(key, LearnerAccess())
        return open_channel(self._address_of(key), key=access.steering_key, trust=access.trust)

    def _log_silence(self, key: RunKey, connection: _Connection) -> None:
        """Log why a learner gives no signals: each reason once, as a warning."""
        cause, is_known = self.silence(key), connection.control.last_known() is not None
        is_starting = not is_known and self._clock() - connection.opened_s < _STARTING_S
        if cause is None or (is_starting and cause.reason == "Unreachable"):
            return
        if cause.reason not in connection.warned_of:
            _LOGGER.warning("%s: no signals from the learner: %s", key, cause.message)
            connection.warned_of.add(cause.reason)


def silence_cause(error: grpc.aio.AioRpcError | ValueError) -> Cause:
    """Return why a learner that should answer does not: the network, a certificate or the key."""
    told = call_failure(error)
    if isinstance(error, ValueError):
        return Cause(reason="SignalsInvalid", message=f"{told}: its image is of another version")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        fix = "its pod is older than the Secret of keys: suspend and resume the run"
        return Cause(reason="KeyRefused", message=f"{told}: {fix}")
    if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        fix = "network policies of the run's and the operator's namespace must allow port 7600"
        return Cause(reason="Unreachable", message=f"{told}: {fix}")
    return Cause(reason="CallFailed", message=told)
