"""Commands: what rank 0 does together with the other ranks, one after another.

```
rank 0      call("begin", work, ...)   name, arguments -> all    work()      how it ended -> all
rank 1..n   follow()                   waits for them            handler()   how it ended -> all
```

An error that all ranks have raised ends the command and nothing else: parameters and connections
are as before. After any other error the ranks no longer agree about where they are, so all of them
end, and say which rank was the cause.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from vcpo.wire.trajectory import Trajectory
from vcpo_learner.ranks.ranks import Communication, LostRankError, Ranks

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")
_OnRanks = TypeVar("_OnRanks", bound="OnRanks")

Groups = Sequence[Sequence[Trajectory]]
_STOP: Final = "stop"
_GRACE: Final = timedelta(seconds=10)
"""Time that a rank with an error waits for the others. One that raises the same error is only the
work between two collectives behind; any other waits for this rank until it ends."""
_TEXT_BYTES: Final = 512


class Commands:
    """Has all ranks do the same at the same time. Owner: the tensor thread."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._handlers: dict[str, Callable[..., object]] = {}
        self.is_broken = False
        """Whether the ranks no longer agree; they have to start again."""

    @property
    def leads(self) -> bool:
        return self._ranks.is_leader

    def on(self, name: str, handler: Callable[..., object]) -> None:
        self._handlers[name] = handler

    def call(self, name: str, work: Callable[[], _Result], *args: Any, **fields: Any) -> _Result:
        """Do `work` here while the other ranks do what is set for `name`; return its result.

        args, fields: for the handlers; anything that pickles.

        Raises:
            LostRankError: naming the ranks that failed alone, or that one is gone.
            Exception: the error of `work`, if every rank raised one.
        """
        self._ranks.use_device()
        communication = self._ranks.communication
        if communication is None:
            return work()
        if self.is_broken:
            raise LostRankError("the ranks do not agree any more: start them again")
        self._exchange_command(communication, (name, args, fields))
        return self._agree(communication, name, work)

    def stop(self) -> None:
        """End the loops of the other ranks; nothing can be called after it."""
        communication = self._ranks.communication
        if communication is not None and not self.is_broken:
            self._exchange_command(communication, (_STOP, (), {}))
            self._agree(communication, _STOP, lambda: None)

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
            name, args, fields = self._exchange_command(communication)
            if name == _STOP:
                self._agree(communication, _STOP, lambda: None)
                return
            self._obey(communication, name, *args, **fields)

    def _obey(self, communication: Communication, name: str, *args: Any, **fields: Any) -> None:
        try:
            self._agree(communication, name, lambda: self._handlers[name](*args, **fields))
        except LostRankError:
            raise
        except Exception:  # alike on all ranks, so rank 0 decides what follows
            _LOGGER.exception("rank %d: %s failed", self._ranks.rank, name)

    def _exchange_command(
        self, communication: Communication, command: tuple[str, Any, Any] | None = None
    ) -> tuple[str, Any, Any]:
        """Return the command that rank 0 gives, on every rank; others wait for it without limit."""
        found: list[Any] = [command]
        try:
            dist.broadcast_object_list(found, src=0, group=communication.commands)
        except RuntimeError as error:
            self.is_broken = True
            raise LostRankError(
                f"rank {self._ranks.rank} ends: another rank is gone ({_text(error)})"
            ) from error
        name, args, fields = found[0]
        return name, args, fields

    def _agree(
        self, communication: Communication, name: str, work: Callable[[], _Result]
    ) -> _Result:
        """Do work, and hear how it ended on the other ranks."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - a model's own code may raise anything
            error = raised
        try:
            failed = self._failed(communication, error)
        except RuntimeError as lost:
            self.is_broken = True
            texts = _noted(communication, self._ranks) or {self._ranks.rank: _text(error or lost)}
            raise LostRankError(
                f"'{name}' did not end on every rank, one is gone or waits for another:"
                f" {_causes(texts)}"
            ) from (error or lost)
        if failed and (len(failed) < self._ranks.size or any(map(_is_torn, failed.values()))):
            self.is_broken = True
            raise LostRankError(
                f"'{name}' did not end alike on all ranks: {_causes(failed)}"
            ) from error
        if error is not None:
            raise error
        return result

    def _failed(self, communication: Communication, error: Exception | None) -> dict[int, str]:
        """Return what every rank's error says, by rank."""
        own = "" if error is None else _text(error)
        content = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        data = bytearray(own.encode()[:_TEXT_BYTES])
        if data:
            content[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        ends = [torch.empty_like(content) for _ in range(self._ranks.size)]
        # One that waits in vain within its work, and so answers late, is still heard.
        patience = _GRACE if error else communication.timeout + _GRACE
        try:
            gathering = dist.all_gather(ends, content, communication.control, async_op=True)
            assert gathering is not None
            gathering.wait(patience)
        except RuntimeError:
            if own and not _is_torn(own):
                communication.errors.set(f"{self._ranks.rank}", own)
            raise
        texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in ends]
        return {rank: text for rank, text in enumerate(texts) if text}


class OnRanks(Protocol):
    """Something that every rank has, and whose methods they do together."""

    @property
    def commands(self) -> Commands | None:
        """None: every rank calls the methods by itself."""


def on_every_rank(
    method: Callable[Concatenate[_OnRanks, _Given], _Result],
) -> Callable[Concatenate[_OnRanks, _Given], _Result]:
    """Have all ranks do a method together, with the same arguments, when rank 0 calls it.

    The others call it as the handler of a command: `Commands.on`. They get trajectories
    `without_tokens`.
    """

    @wraps(method)
    def together(self: _OnRanks, /, *args: _Given.args, **fields: _Given.kwargs) -> _Result:
        work = partial(method, self, *args, **fields)
        commands = self.commands
        if commands is None or not commands.leads:
            return work()
        told = map(without_tokens, args)
        return commands.call(method.__name__, work, *told, **fields)

    return together


def without_tokens(given: Any) -> Any:
    """Return trajectories, or groups of them, with what all ranks need; else what is given.

    Of token ids that is their number; of log-probabilities, versions and reward all.
    """
    if isinstance(given, list | tuple):
        return [without_tokens(each) for each in given]
    if not isinstance(given, Trajectory):
        return given
    return replace(
        given,
        prompt_token_ids=range(len(given.prompt_token_ids)),
        response_token_ids=range(len(given.response_token_ids)),
        expert_routes=None,
        reward_parts={},
        question="",
        answer="",
    )


def _noted(communication: Communication, ranks: Ranks) -> dict[int, str]:
    found = {}
    with suppress(RuntimeError, ValueError):  # the store may be gone with its rank
        for rank in range(ranks.size):
            if communication.errors.check([f"{rank}"]):
                found[rank] = communication.errors.get(f"{rank}").decode()
    return found


def _causes(failed: Mapping[int, str]) -> str:
    first = {rank: text for rank, text in failed.items() if not _is_torn(text)} or failed
    return "; ".join(f"rank {rank}: {text}" for rank, text in first.items())


def _is_torn(text: str) -> bool:
    return text.startswith("Dist") or (text.startswith("RuntimeError") and "gloo" in text)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
