"""`python -m vcpo_rollout.generation.environment_trial < run.yaml`: tries a run's environment.

It makes the environment, asks for prompts and has a small response judged, each in a thread and
with a limit, as a worker does. It ends with 0, with `CANNOT_START` where a worker would fail at
each prompt, or with `NOT_TRIED` where a service does not answer or a call takes long. The message
then follows the mark of start errors in the log, and begins with the field.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NoReturn, TypeVar

import grpc

from vcpo.api import VCPORun, parse_run
from vcpo.metrics import RolloutMetrics
from vcpo.service.lifecycle import NOT_TRIED, StartError, report_start_error, start_errors
from vcpo.service.plugins import import_from_run_folder
from vcpo.wire.failures import FailureCause
from vcpo_rollout.environments.environment import (
    Conversation,
    Environment,
    MultiTurnEnvironment,
    Prompt,
    Split,
)
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import (
    EnvironmentFailedError,
    EnvironmentThreads,
    check_judgement,
    environment_errors,
    require_type,
)
from vcpo_rollout.generation.rewards import JudgedEnvironment, make_task

_Result = TypeVar("_Result")

RESPONSE: Final = "The answer is 42."
"""The response that the environment judges; it must judge any text."""
_CALL_S: Final = 20.0
"""Longest wait for one call; a worker waits for half of `lease.timeoutSeconds`."""
_UNREACHABLE: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_NO_ANSWER: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class NotTriedError(Exception):
    """The trial did not come to its end here; a worker may have more luck."""


def main() -> NoReturn:
    """Read a run from standard input, try its environment, and exit."""
    status = 0
    try:
        with start_errors():
            run = parse_run(sys.stdin.read(), source="standard input")
            import_from_run_folder(run)
        asyncio.run(try_environment(run))
    except StartError as error:
        status = report_start_error(error)
    except NotTriedError as error:
        report_start_error(StartError(str(error)))
        status = NOT_TRIED
    sys.stderr.flush()
    os._exit(status)  # threads of the environment may never return


async def try_environment(run: VCPORun, *, call_s: float = _CALL_S) -> None:
    """Make a run's environment, and make each kind of call that a worker makes.

    call_s: longest wait for one call.

    Raises:
        StartError: naming the field, where a worker would fail in the same way.
        NotTriedError: naming the field, where a service did not answer, or a call takes long.
    """
    settings = run.spec.environment
    try:
        environment = make_task(settings, run.spec.seed)
    except ValueError as error:
        raise (NotTriedError if _is_unanswered(error) else StartError)(str(error)) from error
    calls = _Calls(run, environment, call_s=call_s)
    prompt = await calls.prompt(Split.TRAIN, 0)
    await calls.prompt(Split.TRAIN, 1)
    await calls.prompt(Split.EVALUATION, 0)
    again = await calls.prompt(Split.TRAIN, 0)
    if (again.text, again.messages) != (prompt.text, prompt.messages):
        calls.refuse(
            f"prompt('train', 0) returned {prompt.text!r:.100} and then {again.text!r:.100}; it"
            " must return the same prompt for the same seed, split and index"
        )
    await calls.judge(prompt)


class _Calls:
    """The calls of a trial; an error names the environment's class and the call."""

    def __init__(self, run: VCPORun, environment: Environment, *, call_s: float) -> None:
        self._environment = environment
        self._judged = isinstance(environment, JudgedEnvironment)
        own = environment.environment if isinstance(environment, JudgedEnvironment) else environment
        self._class = f"{type(own).__name__}."
        self._field = "environment.name"
        is_own = ":" in run.spec.environment.name
        self._cure = "the class" if is_own else "environment.parameters"
        self._most_reward = run.spec.environment.max_absolute_reward
        self._allowed_s = run.spec.environment_timeout_s
        self._waited_s = min(call_s, self._allowed_s)
        gauges = RolloutGauges(RolloutMetrics(run=run.metadata.name, group="trial"))
        self._threads = EnvironmentThreads(1, gauges=gauges, timeout_s=self._waited_s)

    async def prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt of the environment."""
        make = self._environment.prompt
        name = f"prompt('{split}', {index})"
        return await self._call(
            name,
            FailureCause.PROMPT,
            lambda: require_type(make(split, index), Prompt, make),
        )

    async def judge(self, prompt: Prompt) -> None:
        """Have a response judged; in a conversation, after one turn."""
        name, method = "reward(prompt, response)", self._environment.reward
        if self._judged:
            name, self._class = "a function", ""
            self._field, self._cure = "environment.rewards", "the function"
        judge: Callable[[], object] = partial(method, prompt, RESPONSE)
        if isinstance(self._environment, MultiTurnEnvironment):
            conversation = await self._first_turn(self._environment, prompt)
            name, judge = "reward()", conversation.reward
        judgement = await self._call(
            name, FailureCause.REWARD, lambda: check_judgement(judge(), judge)
        )
        value = judgement.reward
        if abs(value) > self._most_reward:
            self.refuse(
                f"{name} returned {value:g}, and a response with more than {self._most_reward:g}"
                " counts as failed (environment.maxAbsoluteReward)"
            )

    async def _first_turn(self, environment: MultiTurnEnvironment, prompt: Prompt) -> Conversation:
        conversation: Conversation = await self._call(
            "converse(prompt)", FailureCause.PROMPT, partial(environment.converse, prompt)
        )
        for method in ("next_turn", "reward"):
            if not callable(getattr(conversation, method, None)):
                self.refuse(
                    f"converse(prompt) returned {conversation!r:.100}; it must return an object"
                    f" with the methods next_turn and reward, and this one has no {method}"
                )
        take = conversation.next_turn

        def reply() -> None:
            if (text := take(RESPONSE)) is not None:
                require_type(text, str, take)

        await self._call("next_turn(response)", FailureCause.REPLY, reply)
        return conversation

    async def _call(
        self, name: str, cause: FailureCause, function: Callable[[], _Result]
    ) -> _Result:
        """Call a function of the environment in a thread.

        Raises:
            StartError, NotTriedError: if it fails.
        """

        def guarded() -> _Result:
            with environment_errors(cause):
                return function()

        try:
            return await self._threads.call(guarded)
        except EnvironmentFailedError as error:
            failure = error.failure
            where = f" ({failure.location})" if failure.location else ""
            if failure.cause is FailureCause.TIMEOUT:
                self._refuse_slow(name, where)
            what = failure.message + where  # what the method must return, and what it returned
            if failure.exception_type:
                what = f"{self._class}{name} raised {failure.exception_type}: {what}"
            if _is_unanswered(error):
                raise NotTriedError(f"{self._field}: {what}") from error
            self._blame(what)

    def refuse(self, what: str) -> NoReturn:
        """Raise an error about a method; `what` begins with its name."""
        self._blame(f"{self._class}{what}")

    def _blame(self, what: str) -> NoReturn:
        raise StartError(f"{self._field}: {what}; correct {self._cure}")

    def _refuse_slow(self, name: str, where: str) -> NoReturn:
        allowed = f"{self._allowed_s:g} s (half of lease.timeoutSeconds)"
        if self._allowed_s <= self._waited_s:
            self.refuse(f"{name} had not returned after {allowed}{where}")
        raise NotTriedError(
            f"{self._field}: {self._class}{name} had not returned after {self._waited_s:g} s"
            f"{where}; a worker waits for {allowed}"
        )


def _is_unanswered(error: BaseException) -> bool:
    """Return whether an error comes from a service that does not answer or cannot be reached."""
    return any(
        isinstance(each, ConnectionError | TimeoutError | socket.gaierror)
        or (isinstance(each, OSError) and each.errno in _UNREACHABLE)
        or (isinstance(each, grpc.RpcError) and _status(each) in _NO_ANSWER)
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: grpc.RpcError) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


if __name__ == "__main__":
    main()
