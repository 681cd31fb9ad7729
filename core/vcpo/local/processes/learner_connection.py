"""The host's line to the learner: asks for signals, and knows how old the last ones are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import grpc

from vcpo.control.signals import RunSignals
from vcpo.learner_control import LearnerControl, run_signals
from vcpo.wire.client import open_channel
from vcpo.wire.phase import RunPhase, phase_from_message
from vcpo.wire.v1 import control_pb2


class LearnerConnection:
    """Signals of the learner, through all of its processes: each serves on the port of the first.

    answer_timeout_s: how long the learner may take to answer.
    """

    def __init__(
        self, *, token: str, answer_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.port = 0
        """Port of the learner; 0 before it first served."""
        self.latest: control_pb2.Signals | None = None
        """Its last signals; None before the first."""
        self.furthest_step = 0
        """Most steps that were taken, in any process: one that finds no checkpoint counts anew."""
        self.answers = False
        """Whether signals came when it was asked last: if not, no other call to it is worth its
        timeout."""
        self._token = token
        self._answer_timeout_s = answer_timeout_s
        self._clock = clock
        self._latest_s = 0.0
        self._channel: grpc.aio.Channel | None = None

    @property
    def control(self) -> LearnerControl | None:
        """Calls to the learner; None before it first served."""
        return None if self._channel is None else LearnerControl(self._channel)

    @property
    def age_s(self) -> float | None:
        """Age of the last signals; None before the first."""
        return None if self.latest is None else self._clock() - self._latest_s

    @property
    def phase(self) -> RunPhase:
        """The run's phase as the learner last told it."""
        return RunPhase.RUNNING if self.latest is None else phase_from_message(self.latest.phase)

    def open(self, port: int) -> None:
        """Note where the learner serves."""
        self.port = port
        if self._channel is None:
            self._channel = open_channel(f"127.0.0.1:{port}", token=self._token)

    async def ask(self) -> None:
        """Ask for signals; `answers` tells whether they came."""
        self.answers = False
        if (control := self.control) is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                self.latest = await control.signals(timeout_s=self._answer_timeout_s)
                self.furthest_step = max(self.furthest_step, self.latest.step)
                self._latest_s = self._clock()
                self.answers = True

    def signals(self) -> RunSignals | None:
        """The last signals with their age; None when there are none that make sense."""
        if self.latest is None or (age_s := self.age_s) is None:
            return None
        try:
            return run_signals(self.latest, age_s=age_s)
        except ValueError:
            return None

    async def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            await self._channel.close()
