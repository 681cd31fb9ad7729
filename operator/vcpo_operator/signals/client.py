"""Signals: asking learners how their run is, and telling them their limits.

Straight from the learner over gRPC by default: the answer is of this moment, and there is one
system less that can be down when the control loop needs it. `prometheus` is the other
source. What cannot be had now is answered with what was heard last and its age; `vcpo.control`
judges the age. Orders go over gRPC in either case.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import grpc

from vcpo.learner_control import LearnerControl
from vcpo.wire.client import open_channel
from vcpo_operator.names import RunKey, learner_address
from vcpo_operator.observed.report import LearnerReport, learner_report

_LOGGER = logging.getLogger(__name__)

AddressOf = Callable[[RunKey], str]
"""Where the learner of a run answers: `host:port`."""


class LearnerCommandError(Exception):
    """The learner did not take an order; it is given again as long as it is needed."""


class SignalSource(Protocol):
    """Where the reports of learners come from."""

    async def ask(self, key: RunKey, *, period_s: float) -> LearnerReport | None:
        """What the learner says now, or what it said last and how long ago; None: never anything.

        period_s: Time between two decisions; a source need not be asked anew within half of it.
        """

    async def disconnect(self, key: RunKey) -> None:
        """Forget a learner that is gone, and what it said."""

    async def close(self) -> None:
        """Let go of all connections."""


@dataclass(slots=True, kw_only=True)
class _Line:
    """The connection to one learner, and what was heard over it last."""

    channel: grpc.aio.Channel
    asked_s: float
    heard: LearnerReport | None = None
    heard_s: float = 0.0
    silent: bool = False
    """Whether the last question got no answer."""

    def aged(self, now_s: float) -> LearnerReport | None:
        if self.heard is None:
            return None
        return replace(self.heard.aged(now_s - self.heard_s), is_silent=self.silent)


class LearnerConnections:
    """Connections to the learners of all runs. One owner: the operator's loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        address_of: AddressOf = learner_address,
    ) -> None:
        self._clock = clock
        self._address_of = address_of
        self._tokens: dict[RunKey, str] = {}
        self._lines: dict[RunKey, _Line] = {}

    async def set_token(self, key: RunKey, token: str) -> None:
        """Show the learner of a run this token from now on; empty: none is known."""
        if self._tokens.get(key, "") == token:
            return
        self._tokens[key] = token
        line = self._lines.get(key)
        if line is not None:
            await line.channel.close()
            line.channel = open_channel(self._address_of(key), token=token)

    def forget_token(self, key: RunKey) -> None:
        """Forget the token of a run that is gone."""
        self._tokens.pop(key, None)

    async def ask(self, key: RunKey, *, period_s: float) -> LearnerReport | None:
        """What the learner says now, or what it said last and how long ago.

        period_s: A learner asked more recently than half of this is not asked again; what it said
            is then handed out with its age.
        """
        now_s = self._clock()
        line = self._lines.get(key)
        if line is not None and now_s - line.asked_s < period_s / 2:
            return line.aged(now_s)
        line = self._line(key)
        line.asked_s = now_s
        try:
            line.heard = learner_report(await LearnerControl(line.channel).signals())
        except (grpc.aio.AioRpcError, ValueError) as error:
            _LOGGER.debug("%s: no signals: %s", key, error)
            if _refuses_token(error) and not line.silent:  # once, not at every look
                _LOGGER.warning(
                    "%s: the learner refuses the run's token: its pod is older than the Secret;"
                    " suspend the run and go on, or delete the pod",
                    key,
                )
            line.silent = True
            return line.aged(self._clock())
        line.heard_s, line.silent = now_s, False
        return line.heard

    async def throttle(self, key: RunKey, admission_lag_steps: int, reason: str) -> None:
        """Set the lag bound for new work.

        Raises: LearnerCommandError when the learner does not answer.
        """
        with _giving("throttle"):
            await LearnerControl(self._line(key).channel).throttle(admission_lag_steps, reason)

    async def drain(self, key: RunKey, reason: str) -> None:
        """Ask the learner to end in good order.

        Raises: LearnerCommandError when the learner does not answer.
        """
        with _giving("drain"):
            await LearnerControl(self._line(key).channel).drain(reason)

    async def release(self, key: RunKey, worker: str) -> None:
        """Hand back the leases of a worker that is gone.

        Raises: LearnerCommandError when the learner does not answer.
        """
        with _giving("release"):
            await LearnerControl(self._line(key).channel).release_all_leases(worker)

    async def disconnect(self, key: RunKey) -> None:
        """Forget a learner that is gone, and what it said."""
        line = self._lines.pop(key, None)
        if line is not None:
            await line.channel.close()

    async def close(self) -> None:
        """Close all connections."""
        for key in list(self._lines):
            await self.disconnect(key)

    def _line(self, key: RunKey) -> _Line:
        if key not in self._lines:
            channel = open_channel(self._address_of(key), token=self._tokens.get(key))
            self._lines[key] = _Line(channel=channel, asked_s=self._clock())
        return self._lines[key]


def _refuses_token(error: Exception) -> bool:
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    return code is grpc.StatusCode.UNAUTHENTICATED


@contextlib.contextmanager
def _giving(order: str) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise LearnerCommandError(f"the learner took no {order}: {error.details()}") from error
