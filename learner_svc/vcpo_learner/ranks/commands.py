"""Commands: what rank 0 does together with the other ranks, one after another.

```
rank 0      call("begin", work, ...)   header -> store        work()      outcomes
rank 1..n   follow()                   waits for the header   handler()   own outcome
```

Every rank says in the store how a command ended on it. An error that all ranks have raised ends
the command and nothing else: parameters and connections are as before. After any other error the
ranks no longer agree about where they are, so all of them end, and say which rank was the cause.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from vcpo.wire.trajectory import Trajectory, trajectory_from_message, trajectory_to_message
from vcpo.wire.v1 import work_pb2
from vcpo_learner.ranks.ranks import Communication, LostRankError, Ranks, missing_keys

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")
_OnRanks = TypeVar("_OnRanks", bound="OnRanks")

Groups = Sequence[Sequence[Trajectory]]
Handler = Callable[..., object]
"""Does a command on a rank other than 0; takes its fields."""
_SIZE_BYTES: Final = 8

_STOP = "stop"
_POLL: Final = timedelta(minutes=10)
"""A rank that waits for a command asks again after this time, as rank 0 may wait for hours. Each
time PyTorch writes two lines of its own to the log. The end of rank 0 ends the waiting at once."""
_GRACE: Final = timedelta(seconds=10)
"""Time that a rank with an error waits for the outcomes of the others. A rank that raised the same
error is only the work between two collectives behind."""


class Commands:
    """Has all ranks do the same at the same time. Owner: the tensor thread."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._handlers: dict[str, Handler] = {}
        self._number = 0
        self.is_broken = False
        """Whether the ranks no longer agree; they have to start again."""

    @property
    def leads(self) -> bool:
        """Whether this rank says what all do."""
        return self._ranks.is_leader

    def on(self, name: str, handler: Handler) -> None:
        """Set what the other ranks do at a command."""
        self._handlers[name] = handler

    def call(self, name: str, work: Callable[[], _Result], **fields: Any) -> _Result:
        """Do `work` here while the other ranks do what is set for `name`; return its result.

        fields: numbers and texts, for the handlers; a path arrives as text.

        Raises:
            LostRankError: naming the ranks that failed alone or did not answer.
            Exception: the error of `work`, if every rank raised one.
        """
        self._ranks.use_device()
        communication = self._ranks.communication
        if communication is None:
            return work()
        self._require_whole()
        self._number += 1
        header = json.dumps({"name": name, "fields": fields}, default=str)
        try:
            communication.store.set(self._header_key, header)
            result = work()
        except Exception as error:
            self._agree(communication, name, error)
            raise
        self._agree(communication, name, None)
        return result

    def spread_groups(self, groups: Groups) -> Groups:
        """Return the groups that rank 0 gives, within a command: the same numbers on every rank."""
        if self._ranks.communication is None:
            return groups
        return groups_from_bytes(self._ranks.spread(groups_to_bytes(groups)))

    def spread_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tensors and plain values that rank 0 gives, within a command."""
        if self._ranks.communication is None:
            return state
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        sent = io.BytesIO(self._ranks.spread(buffer.getvalue()))
        found: dict[str, Any] = torch.load(sent, weights_only=True)
        return found

    def stop(self) -> None:
        """End the loops of the other ranks; nothing can be called after it."""
        communication = self._ranks.communication
        if communication is None or self.is_broken:
            return
        self._number += 1
        communication.store.set(self._header_key, json.dumps({"name": _STOP}))
        # Rank 0 may hold the store: it stays until all have read the last command.
        keys = [self._outcome_key(rank) for rank in range(1, self._ranks.size)]
        missing_keys(communication.store, keys, _GRACE)

    def follow(self) -> None:
        """Do the commands of rank 0 until it stops.

        Raises:
            LostRankError: if rank 0 is gone, or this rank or another one failed alone.
        """
        communication = self._ranks.communication
        if communication is None:
            raise ValueError("ranks has one rank: nobody sends commands to it")
        self._ranks.use_device()
        while True:
            self._number += 1
            header = self._next_header(communication)
            if header["name"] == _STOP:
                communication.store.set(self._outcome_key(self._ranks.rank), "")
                return
            self._obey(communication, header)

    def _obey(self, communication: Communication, header: Mapping[str, Any]) -> None:
        error: Exception | None = None
        try:
            self._handlers[header["name"]](**header["fields"])
        except Exception as raised:  # a model's own code may raise anything
            _LOGGER.exception("rank %d: %s failed", self._ranks.rank, header["name"])
            error = raised
        self._agree(communication, header["name"], error)

    def _next_header(self, communication: Communication) -> Mapping[str, Any]:
        header = ""
        while not header:
            try:
                communication.store.wait([self._header_key], _POLL)
                header = communication.store.get(self._header_key).decode()
            except dist.DistStoreError:
                pass  # no command yet
            except (RuntimeError, ValueError) as error:
                raise LostRankError(
                    f"rank 0 is gone, rank {self._ranks.rank} ends ({_text(error)})"
                ) from error
        found: dict[str, Any] = json.loads(header)
        return found

    def _agree(self, communication: Communication, name: str, error: Exception | None) -> None:
        """Say how a command ended here; hear how it ended on the others if that matters.

        Raises:
            LostRankError: if it did not end alike on all ranks.
        """
        own = {"error": "" if error is None else _text(error), "is_torn": _is_torn(error)}
        if own["is_torn"]:
            # The neighbors then fail too, instead of waiting for this rank until their timeout.
            self._ranks.close()
        try:
            communication.store.set(self._outcome_key(self._ranks.rank), json.dumps(own))
            if error is None and not self._ranks.is_leader:
                return
            outcomes = self._outcomes(communication, is_patient=error is None)
        except (RuntimeError, ValueError) as gone:
            self.is_broken = True
            raise LostRankError(f"rank 0 is gone in '{name}' ({_text(gone)})") from (error or gone)
        failed = {rank: each for rank, each in outcomes.items() if each is None or each["error"]}
        if self._ranks.is_leader:
            self._forget(communication)
        if not failed:
            return
        is_alike = len(failed) == self._ranks.size and not any(
            each is None or each["is_torn"] for each in failed.values()
        )
        if not is_alike:
            self.is_broken = True
            limit_s = communication.timeout.total_seconds()
            raise LostRankError(_cause(name, failed, limit_s)) from error

    def _outcomes(
        self, communication: Communication, *, is_patient: bool
    ) -> dict[int, dict[str, Any] | None]:
        """Return every rank's outcome; None for one that did not answer."""
        keys = {rank: self._outcome_key(rank) for rank in range(self._ranks.size)}
        # A rank whose neighbors live ends by its own timeout, a little after this one.
        grace = min(_GRACE, 2 * communication.timeout)
        timeout = communication.timeout if is_patient else grace
        missing = missing_keys(communication.store, list(keys.values()), timeout)
        return {
            rank: None if key in missing else json.loads(communication.store.get(key))
            for rank, key in keys.items()
        }

    def _forget(self, communication: Communication) -> None:
        """Remove the keys of the command before this one: by now everyone has read them."""
        before = self._number - 1
        for key in (f"{before}", *(f"{before}/{rank}" for rank in range(self._ranks.size))):
            communication.store.delete_key(key)

    def _require_whole(self) -> None:
        if self.is_broken:
            raise LostRankError("the ranks do not agree any more: start them again")

    @property
    def _header_key(self) -> str:
        return f"{self._number}"

    def _outcome_key(self, rank: int) -> str:
        return f"{self._number}/{rank}"


class OnRanks(Protocol):
    """Something that every rank has, and whose methods they do together."""

    @property
    def commands(self) -> Commands | None:
        """None: every rank calls the methods by itself."""


def on_every_rank(
    method: Callable[Concatenate[_OnRanks, _Given], _Result],
) -> Callable[Concatenate[_OnRanks, _Given], _Result]:
    """Have all ranks do a method together when rank 0 calls it.

    The others are given what rank 0 gives by keyword; `spread_groups` and `spread_state` bring what
    is large. They call the method as the handler of a command: `Commands.on`.
    """

    @wraps(method)
    def together(self: _OnRanks, /, *args: _Given.args, **fields: _Given.kwargs) -> _Result:
        work = partial(method, self, *args, **fields)
        commands = self.commands
        if commands is None or not commands.leads:
            return work()
        return commands.call(method.__name__, work, **fields)

    return together


def groups_to_bytes(groups: Groups) -> bytes:
    """Return groups as bytes; log-probabilities are rounded to float32."""
    parts = []
    for group in groups:
        message = work_pb2.SubmitRequest(trajectories=map(trajectory_to_message, group))
        parts += [message.ByteSize().to_bytes(_SIZE_BYTES, "little"), message.SerializeToString()]
    return b"".join(parts)


def groups_from_bytes(data: bytes) -> list[list[Trajectory]]:
    """Read what `groups_to_bytes` returned."""
    groups, at = [], 0
    while at < len(data):
        start = at + _SIZE_BYTES
        at = start + int.from_bytes(data[at:start], "little")
        members = work_pb2.SubmitRequest.FromString(data[start:at]).trajectories
        groups.append([trajectory_from_message(each, path="trajectories[]") for each in members])
    return groups


def _is_torn(error: Exception | None) -> bool:
    """Whether an error comes from a connection between ranks; gloo's have no class of their own."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _cause(name: str, failed: Mapping[int, Mapping[str, Any] | None], limit_s: float) -> str:
    """Say which ranks a command failed on first; those behind them only lost their neighbors."""
    silent = [rank for rank, outcome in failed.items() if outcome is None]
    causes = [
        f"rank {rank}: {outcome['error']}"
        for rank, outcome in failed.items()
        if outcome is not None and not outcome["is_torn"]
    ]
    if silent:
        numbers = ", ".join(map(str, silent))
        causes.append(
            f"rank {numbers} is gone or did not answer within {limit_s:g} s"
            " (learner.collectiveTimeoutSeconds)"
        )
    if not causes:
        causes = [f"rank {rank}: {outcome['error']}" for rank, outcome in failed.items() if outcome]
    return f"'{name}' did not end alike on all ranks: {'; '.join(causes)}"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
