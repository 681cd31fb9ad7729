"""Environments of the `verifiers` library, whose turns the worker drives.

A run names them `verifiers:PACKAGE`: an installed package with `load_environment(**arguments)`,
which returns one of the library's environments (its classic interface; `tasks` has the task sets of
interface v1). The library's own loop calls a model over HTTP, and the responses have neither exact
tokens nor versions. This module therefore performs the steps of the library's `rollout` in its
order, except the call of the model, and refuses environments that call a model themselves.
"""

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final, TypeVar

from vcpo_rollout.environments.data_sets import Questions
from vcpo_rollout.environments.draws import split_of
from vcpo_rollout.environments.environment import Conversation, Prompt, Split
from vcpo_rollout.environments.verifiers.messages import reply_text, to_assistant_message, to_prompt

_Result = TypeVar("_Result")

_EXTERNAL: Final = frozenset({"SandboxEnv", "SandboxMixin", "RLMEnv", "OpenEnvEnv", "BrowserEnv"})
"""Classes whose environments need a container or a browser of a service."""
_OWN_STEPS: Final = ("rollout", "get_model_response", "add_model_response")
"""Steps that use a model server's response; an environment that overrides one needs one."""


class ModelCalledError(RuntimeError):
    """An environment calls a model itself, outside the policy's turns."""


class VerifiersEnvironment:
    """One environment of the library; the reward is its rubric's score.

    package: Name of the installed package, as the library finds it.
    arguments: Arguments of its `load_environment`.

    If the environment has an evaluation data set, that one is used. Otherwise a tenth of the
    prompts is for evaluation, by a hash of their text. Raises ValueError, naming the parameter,
    when the environment cannot be loaded, or needs a model server or a container.
    """

    def __init__(
        self, *, seed: int, package: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._environment = _load(package, arguments or {})
        _require_supported(package, self._environment)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
        thread.start()
        self._rows: list[dict[str, Any]] = []
        items: dict[Split, dict[str, Prompt]] = {split: {} for split in Split}
        try:
            for split, row in _rows(self._environment):
                info = row.get("info")
                own_tools = info.get("oai_tools") if isinstance(info, dict) else None
                tools = own_tools or self._environment.oai_tools or ()
                prompt = to_prompt(row["prompt"], tools, answer=str(len(self._rows)))
                items[split or split_of(prompt.text)][prompt.text] = prompt
                self._rows.append(row)
        except ValueError as error:
            raise ValueError(f"environment.name: 'verifiers:{package}': {error}") from error
        for text in items[Split.EVALUATION]:
            items[Split.TRAIN].pop(text, None)
        found = {split: tuple(prompts.values()) for split, prompts in items.items()}
        self._questions = Questions(found, seed=seed)

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt with its system message and tools; its `answer` is its row's index."""
        return self._questions.at(split, index)

    def converse(self, prompt: Prompt) -> Conversation:
        """Begin a conversation as the library's `rollout` does."""
        conversation = _Conversation(self._environment, self._loop)
        conversation.begin(self._rows[int(prompt.answer)], prompt)
        return conversation

    def reward(self, prompt: Prompt, response: str) -> float | Mapping[str, float]:
        """Return the rubric's score of a response in a single turn."""
        conversation = self.converse(prompt)
        conversation.next_turn(response)
        return conversation.reward()


class _Conversation:
    """One conversation, in the library's own state.

    All conversations run in one event loop, since the library's environments expect one loop and
    need not be thread-safe.
    """

    def __init__(self, environment: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._environment = environment
        self._loop = loop
        self._state: Any = None
        self._messages: Any = None
        """The messages, or the text, to which the model responds next."""

    def begin(self, row: Mapping[str, Any], prompt: Prompt) -> None:
        self._run(self._begin(row, prompt))

    def next_turn(self, response: str) -> str | None:
        return self._run(self._take_turn(response))

    def reward(self) -> float:
        return self._run(self._judge())

    async def _begin(self, row: Mapping[str, Any], prompt: Prompt) -> None:
        environment = self._environment
        state = await environment.init_state(deepcopy(row), _NoClient(), "policy", None)
        self._state = await environment.setup_state(state) or state
        self._messages = await environment.get_prompt_messages(self._state)
        tools = self._state["oai_tools"] or ()
        if to_prompt(self._messages, tools, answer=prompt.answer) != prompt:
            raise ValueError("the environment changes its prompt when a conversation begins")

    async def _take_turn(self, response: str) -> str | None:
        environment, state = self._environment, self._state
        turn: Any = response
        if not isinstance(self._messages, str):
            turn = [to_assistant_message(response, has_tools=bool(state["oai_tools"]))]
        await environment.add_trajectory_step(state, _step(state, self._messages, turn))
        if await environment.is_completed(state):
            return None
        before = self._messages + turn
        self._messages = await environment.get_prompt_messages(state)
        # A final message of the environment ends the conversation without a response.
        if state.get("final_env_response") is not None:
            await environment.is_completed(state)
            return None
        if self._messages[: len(before)] != before:
            raise ValueError(
                "the environment changes earlier turns, so the sampled tokens no longer fit"
            )
        return reply_text(self._messages[len(before) :])

    async def _judge(self) -> float:
        environment, state = self._environment, self._state
        if not state["is_completed"]:  # the token limit ended the conversation
            state["is_truncated"] = True
            await environment._cleanup(state)
        await environment.render_completion(state)
        await environment.rubric.score_rollout(state)
        return float(state["reward"])

    def _run(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            return asyncio.run_coroutine_threadsafe(step, self._loop).result()
        except Exception as error:  # may wrap a ModelCalledError
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, ModelCalledError):
                    raise cause from error
                cause = cause.__cause__
            raise


class _NoClient:
    """Takes the place of the library's client of a model server."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and printing read these
            raise AttributeError(name)
        raise ModelCalledError(
            f"the environment calls a model itself (client.{name}); only turns that this worker "
            "samples can be trained on; use an environment whose caller calls the model"
        )


def _step(state: Any, messages: Any, turn: Any) -> dict[str, Any]:
    """Return the library's record of a turn, without the fields of a model server."""
    return {
        "prompt": messages,
        "completion": turn,
        "response": None,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": state["trajectory_id"],
        "extras": {},
    }


def _load(package: str, arguments: Mapping[str, Any]) -> Any:
    # The library's environments install signal handlers, which would end the process without a
    # drain.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        from verifiers import load_environment

        return load_environment(package, **arguments)
    except Exception as error:  # a third-party package may raise anything
        raise ValueError(
            f"environment.name: the environment {package!r} cannot be loaded with the arguments "
            f"{dict(arguments)!r} ({type(error).__name__}: {error}); install its package in the "
            "rollout image, and give what its load_environment takes as environment.parameters."
            "arguments"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _require_supported(package: str, environment: Any) -> None:
    from verifiers import MultiTurnEnv

    kinds = {kind.__name__ for kind in type(environment).__mro__}
    rubrics = getattr(environment.rubric, "rubrics", [environment.rubric])
    problem = None
    if not isinstance(environment, MultiTurnEnv):
        problem = f"is a {type(environment).__name__} and not a MultiTurnEnv"
    elif external := kinds & _EXTERNAL:
        problem = f"runs outside of the worker ({', '.join(sorted(external))})"
    elif own := [
        n for n in _OWN_STEPS if getattr(type(environment), n) is not getattr(MultiTurnEnv, n)
    ]:
        problem = f"calls the model itself ({', '.join(own)})"
    elif group := [name for one in rubrics for name in one._get_group_reward_func_names()]:
        problem = f"judges the responses of a group together ({', '.join(group)})"
    if problem is not None:
        raise ValueError(
            f"environment.name: 'verifiers:{package}' {problem}; use one that replies to "
            "the model's turns in this process (SingleTurnEnv, MultiTurnEnv, ToolEnv) and "
            "judges each alone"
        )


def _rows(environment: Any) -> Iterator[tuple[Split | None, dict[str, Any]]]:
    """Yield split and row of the environment's data sets; None if there is only one set."""
    built = {
        Split.TRAIN: environment.build_dataset(),
        Split.EVALUATION: environment.build_eval_dataset(),
    }
    found = {split: rows for split, rows in built.items() if rows is not None}
    for split, rows in found.items():
        for row in rows:
            yield (split if len(found) > 1 else None), row
