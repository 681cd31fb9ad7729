"""The interface between a worker and its environment, and how an environment is found.

A lease names a prompt by (split, index) and carries no text. The environment makes the prompt from
these two and its seed, so every worker of a run makes the same prompt for the same lease, also
after a crash.

Built-in environments are found in the same way as a user's class `package.module:Class`: the class
is called with the run's parameters and `seed` as keyword arguments, and its signature lists the
parameters it knows (`vcpo.service.plugins`).
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, Protocol, TypedDict, cast, runtime_checkable

from vcpo.api.environments import BUILT_IN
from vcpo.service.plugins import beside_or_in, import_named, require_arguments, require_class

_VERIFIERS: Final = "vcpo_rollout.environments.verifiers:VerifiersTasks"
"""The class behind `verifiers:PACKAGE`."""
_ROLES: Final = ("system", "user", "assistant")


class Split(StrEnum):
    """The two disjoint sets of items from which prompts come."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class Message(TypedDict):
    """One message of a prompt, in the form of chat templates."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model is asked, and what its environment needs to judge the response."""

    text: str = ""
    """The prompt without a chat template; by default what the messages say."""
    messages: tuple[Message, ...] = field(default=(), hash=False)
    """The prompt for a chat template; the last message is from the user. Without messages the text
    is one user message. A list of dicts is accepted."""
    answer: str = ""
    """The ground truth in the environment's private format; never shown to the model."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What else the judge needs, such as the other columns of a data set; never shown either."""

    def __post_init__(self) -> None:
        for number, message in enumerate(self.messages):
            if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
                raise ValueError(
                    f"messages[{number}]: must have a role ({', '.join(_ROLES)}) and a text as "
                    f"content, got {reprlib.repr(message)}"
                )
        if self.messages and self.messages[-1]["role"] != "user":
            raise ValueError("messages: the last must be from the user; the model answers it")
        if self.messages and not self.text:
            joined = "\n\n".join(message["content"] for message in self.messages)
            object.__setattr__(self, "text", joined)
        object.__setattr__(self, "messages", tuple(self.messages))
        self.text.encode()  # half a pair of surrogates is no text


class Environment(Protocol):
    """A task, which makes prompts and judges responses."""

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return prompt `index` (>= 0) of a split.

        The same seed, split and index give the same prompt. No item is in both splits.
        """

    def reward(self, prompt: Prompt, response: str) -> float | Mapping[str, float]:
        """Return a finite reward, in the range that the task documents, for any response.

        A mapping holds its parts by name, 16 at most, and people see each: the reward is the part
        `score` if there is one, else their sum.
        """


class Conversation(Protocol):
    """One conversation with the model, about one prompt."""

    def next_turn(self, response: str) -> str | None:
        """Take a turn of the model; return the reply, or None to end the conversation.

        The worker passes every turn, also one that reached the token limit. It drops the reply if
        the limit leaves the model no further token.
        """

    def reward(self) -> float | Mapping[str, float]:
        """Return the reward of the conversation, as `Environment`. Called once, at the end."""


@runtime_checkable
class MultiTurnEnvironment(Environment, Protocol):
    """A task with multi-turn responses. Its `reward` judges a response of a single turn."""

    def converse(self, prompt: Prompt) -> Conversation:
        """Begin a conversation about a prompt; every response to the prompt has its own."""


def make_environment(name: str, parameters: Mapping[str, object], seed: int) -> Environment:
    """Make the environment that a run names, with its parameters; a ValueError names the field."""
    field = "environment.parameters"
    path, arguments = name, parameters
    library, _, package = name.partition(":")
    if library == "verifiers" and package:
        path, arguments = _VERIFIERS, {**parameters, "package": package}
    environment_class = _environment_class(path)
    if "seed" in parameters:
        given = parameters["seed"]
        raise ValueError(f"{field}.seed: {given!r} is not read here; set the run's seed instead")
    require_arguments(environment_class, arguments, beside=("seed",), field=field, name=name)
    try:
        return cast("Environment", environment_class(**arguments, seed=seed))
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ValueError(
            f"{field}: {name!r} cannot be made with {dict(parameters)!r} "
            f"({type(error).__name__}: {error}); correct the parameters or the class"
        ) from error


def _environment_class(name: str) -> type:
    implementation = BUILT_IN[name].implementation if name in BUILT_IN else name
    module_name, _, class_name = implementation.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        known = f"{', '.join(sorted(BUILT_IN))}, or package.module:Class for your own"
        raise ValueError(f"environment.name: {name!r} is unknown; use one of {known}")
    field = "environment.name"
    found = import_named(implementation, field=field, fix=beside_or_in("rollout"), name=name)
    return require_class(
        found, field=field, name=name, what="an environment", methods=("prompt", "reward")
    )
