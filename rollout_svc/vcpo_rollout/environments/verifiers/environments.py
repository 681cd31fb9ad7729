"""Environments of the `verifiers` library, their turns driven by our own loop.

A run names them `verifiers:PACKAGE`: an installed package with `load_environment(**arguments)`,
which returns one of the library's environments (its classic interface; task sets of its interface
v1 are in `verifiers_tasks`). The library's own loop asks a model over HTTP, and what comes back
that way has neither exact tokens nor versions. So its `rollout` is done here, step by step in its
order, without the step that asks the model; and environments that ask by themselves are refused.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Coroutine, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final, TypeVar

from vcpo_rollout.environments.data_sets import Questions
from vcpo_rollout.environments.draws import split_of
from vcpo_rollout.environments.environment import Conversation, Prompt, Split
from vcpo_rollout.environments.verifiers.messages import answer_message, prompt_from, reply_text

_Result = TypeVar("_Result")

_OUTSIDE: Final = frozenset({"SandboxEnv", "SandboxMixin", "RLMEnv", "OpenEnvEnv", "BrowserEnv"})
"""Classes whose environments work in a container or a browser that a service lends."""
_OWN_STEPS: Final = ("rollout", "get_model_response", "add_model_response")
"""Steps that touch the model's answer as a server gives it; whoever has its own needs one."""


class ModelCalledError(RuntimeError):
    """An environment asks a model by itself, beside the policy's own turns."""


class VerifiersEnvironment:
    """One environment of the library; the reward is its rubric's score.

    package: Name of the installed package, as the library finds it.
    arguments: Given to its `load_environment`.

    A data set of its own for evaluation is used; without one, a tenth of the prompts is kept, by a
    hash of their text. Raises ValueError, naming the parameter, when the environment cannot be
    loaded, or cannot be driven without a model's server or a container.
    """

    def __init__(
        self, *, seed: int, package: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._environment = _load(package, arguments or {})
        _require_drivable(package, self._environment)
        self._loop = _start_loop()
        self._rows: list[dict[str, Any]] = []
        items: dict[Split, dict[str, Prompt]] = {split: {} for split in Split}
        try:
            for split, row in _rows(self._environment):
                tools, answer = _tools(self._environment, row), str(len(self._rows))
                prompt = prompt_from(row["prompt"], tools, answer=answer)
                items[split or split_of(prompt.text)][prompt.text] = prompt
                self._rows.append(row)
        except ValueError as error:
            raise ValueError(f"environment.name: 'verifiers:{package}': {error}") from error
        for text in items[Split.EVALUATION]:
            items[Split.TRAIN].pop(text, None)
        found = {split: tuple(prompts.values()) for split, prompts in items.items()}
        self._questions = Questions(found, seed=seed)

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt, its system message and tools before it; the answer names its row."""
        return self._questions.at(split, index)

    def converse(self, prompt: Prompt) -> Conversation:
        """Begin as the library's `rollout` does."""
        exchange = _Exchange(self._environment, self._loop)
        exchange.begin(self._rows[int(prompt.answer)], prompt)
        return exchange

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return the rubric's score of a response in a single turn."""
        exchange = self.converse(prompt)
        exchange.next_turn(response)
        return exchange.reward()


class _Exchange:
    """One conversation, kept in the library's own state.

    All conversations run in one event loop, since environments are written for one, and need not
    stand several threads.
    """

    def __init__(self, environment: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._environment = environment
        self._loop = loop
        self._state: Any = None
        self._asked: Any = None
        """Messages, or text, that the model answers next."""

    def begin(self, row: Mapping[str, Any], prompt: Prompt) -> None:
        self._run(self._begin(row, prompt))

    def next_turn(self, response: str) -> str | None:
        return self._run(self._hear(response))

    def reward(self) -> float:
        return self._run(self._judge())

    async def _begin(self, row: Mapping[str, Any], prompt: Prompt) -> None:
        environment = self._environment
        state = await environment.init_state(deepcopy(row), _NoClient(), "policy", None)
        self._state = await environment.setup_state(state) or state
        self._asked = await environment.get_prompt_messages(self._state)
        tools = self._state["oai_tools"] or ()
        if prompt_from(self._asked, tools, answer=prompt.answer) != prompt:
            raise ValueError("the environment changes its prompt when a conversation begins")

    async def _hear(self, response: str) -> str | None:
        environment, state = self._environment, self._state
        answer: Any = response
        if not isinstance(self._asked, str):
            answer = [answer_message(response, has_tools=bool(state["oai_tools"]))]
        await environment.add_trajectory_step(state, _step(state, self._asked, answer))
        if await environment.is_completed(state):
            return None
        before = self._asked + answer
        self._asked = await environment.get_prompt_messages(state)
        # It may have ended the conversation with its last words, which nobody answers.
        if state.get("final_env_response") is not None:
            await environment.is_completed(state)
            return None
        if self._asked[: len(before)] != before:
            raise ValueError(
                "the environment rewrites earlier turns, which were sampled as they are"
            )
        return reply_text(self._asked[len(before) :])

    async def _judge(self) -> float:
        environment, state = self._environment, self._state
        if not state["is_completed"]:  # the model had no room for more
            state["is_truncated"] = True
            await environment._cleanup(state)
        await environment.render_completion(state)
        await environment.rubric.score_rollout(state)
        return float(state["reward"])

    def _run(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            return asyncio.run_coroutine_threadsafe(step, self._loop).result()
        except Exception as error:  # the environment's own, which may wrap that it asked a model
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, ModelCalledError):
                    raise cause from error
                cause = cause.__cause__
            raise


class _NoClient:
    """Stands where the library keeps the client of a model's server."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and printing ask for these
            raise AttributeError(name)
        raise ModelCalledError(
            f"the environment calls a model by itself (client.{name}); only turns that the policy "
            "samples here can be trained on, use an environment that leaves asking to its caller"
        )


def _step(state: Any, asked: Any, answer: Any) -> dict[str, Any]:
    """A turn as the library records it, without what only a model's server knows."""
    return {
        "prompt": asked,
        "completion": answer,
        "response": None,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": state["trajectory_id"],
        "extras": {},
    }


def _load(package: str, arguments: Mapping[str, Any]) -> Any:
    try:
        with _signals_kept():
            from verifiers import load_environment

            return load_environment(package, **arguments)
    except Exception as error:  # it is somebody's package
        raise ValueError(
            f"environment.name: the environment {package!r} cannot be loaded with the arguments "
            f"{dict(arguments)!r} ({type(error).__name__}: {error}); install its package in the "
            "rollout image, and give what its load_environment takes as environment.parameters."
            "arguments"
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The library's environments take the process's signals, and would end it without a drain."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _require_drivable(package: str, environment: Any) -> None:
    from verifiers import MultiTurnEnv

    kinds = {kind.__name__ for kind in type(environment).__mro__}
    problem = None
    if not isinstance(environment, MultiTurnEnv):
        problem = f"is a {type(environment).__name__}, which has no turns of its own"
    elif outside := kinds & _OUTSIDE:
        problem = f"works outside of the worker ({', '.join(sorted(outside))})"
    elif own := [
        n for n in _OWN_STEPS if getattr(type(environment), n) is not getattr(MultiTurnEnv, n)
    ]:
        problem = f"asks the model by itself ({', '.join(own)})"
    elif group := _group_functions(environment.rubric):
        problem = f"judges answers of a group together ({', '.join(group)})"
    if problem is not None:
        raise ValueError(
            f"environment.name: 'verifiers:{package}' {problem}; use one that answers the model's "
            "turns in its own process (SingleTurnEnv, MultiTurnEnv, ToolEnv) and judges each alone"
        )


def _group_functions(rubric: Any) -> list[str]:
    """Names of a rubric's functions that want all answers to a prompt at once."""
    rubrics = getattr(rubric, "rubrics", [rubric])
    return [name for one in rubrics for name in one._get_group_reward_func_names()]


def _rows(environment: Any) -> Iterator[tuple[Split | None, dict[str, Any]]]:
    """Rows of the environment's data sets; without a split where it has but one."""
    built = {
        Split.TRAIN: environment.build_dataset(),
        Split.EVALUATION: environment.build_eval_dataset(),
    }
    found = {split: rows for split, rows in built.items() if rows is not None}
    for split, rows in found.items():
        for row in rows:
            yield (split if len(found) > 1 else None), row


def _tools(environment: Any, row: Mapping[str, Any]) -> Any:
    info = row.get("info")
    own = info.get("oai_tools") if isinstance(info, dict) else None
    return own or environment.oai_tools or ()


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop
