"""The host's connection to the learner: it polls signals and knows their age."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from vcpo.control.signals import RunSignals
from vcpo.learner_control import LearnerControl, call_failure, run_signals
from vcpo.wire.client import open_channel
from vcpo.wire.phase import RunPhase, phase_from_message
from vcpo.wire.v1 import control_pb2


class LearnerConnection:
    """Connection to the learner across its restarts; every process serves on the same port.

    key: the key of who steers the run.
    answer_timeout_s: timeout of a request for signals.
    """

    def __init__(
        self, *, key: str, answer_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.port = 0
        """Port of the learner; 0 before it first serves."""
        self.latest: control_pb2.Signals | None = None
        """The last signals; None before the first."""
        self.furthest_step = 0
        """Largest step of any process; a process that finds no checkpoint starts at 0 again."""
        self.is_answering = False
        """Whether the last poll succeeded. If not, other calls would only time out as well."""
        self.failure = ""
        """Why the last poll brought no signals to act on, in a clause; empty if it did."""
        self._key = key
        self._answer_timeout_s = answer_timeout_s
        self._clock = clock
        self._latest_s = 0.0
        self._channel: grpc.aio.Channel | None = None

    @property
    def control(self) -> LearnerControl | None:
        """Client of the learner's control service; None before it first serves."""
        return None if self._channel is None else LearnerControl(self._channel)

    @property
    def age_s(self) -> float | None:
        """Age of the last signals in seconds; None before the first."""
        return None if self.latest is None else self._clock() - self._latest_s

    @property
    def phase(self) -> RunPhase:
        """The last known phase of the run."""
        return RunPhase.RUNNING if self.latest is None else phase_from_message(self.latest.phase)

    def open(self, port: int) -> None:
        """Connect to the port where the learner serves."""
        self.port = port
        if self._channel is None:
            self._channel = open_channel(f"127.0.0.1:{port}", key=self._key)

    async def poll(self) -> None:
        """Request signals; `is_answering` says whether they came."""
        self.is_answering = False
        if (control := self.control) is None:
            return
        try:
            self.latest = await control.signals(timeout_s=self._answer_timeout_s)
        except grpc.aio.AioRpcError as error:
            self.failure = call_failure(error)
            return
        self.failure = ""
        self.furthest_step = max(self.furthest_step, self.latest.step)
        self._latest_s = self._clock()
        self.is_answering = True

    def signals(self) -> RunSignals | None:
        """Return the last signals with their age; None if there are none or they are invalid."""
        if self.latest is None or (age_s := self.age_s) is None:
            return None
        try:
            return run_signals(self.latest, age_s=age_s)
        except ValueError as error:
            self.failure = str(error)
            return None

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()
