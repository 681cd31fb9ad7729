"""The seam between a worker and its task, and the one door through which a task is found.

A lease names a prompt by (split, index) and carries no text. The worker's environment makes the
prompt from those two and its own seed, so every worker of a run, and a worker that comes back
after a crash, sees the same prompt behind the same lease.

The tasks shipped here pass through the same door as a user's own class `package.module:Class`:
the class is called with the run's parameters and `seed` as keyword arguments, and its signature is
the list of the parameters it knows. Importing a class runs its module, so a run can execute
whatever Python is installed in the worker's image, as its author intends.
"""

import inspect
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Literal, Protocol, TypedDict, cast, runtime_checkable

from vcpo.spec import VCPORun
from vcpo.spec.environments import BUILT_IN
from vcpo.spec.run import RUN_FOLDER_ANNOTATION

_VERIFIERS: Final = "vcpo_rollout.environments.verifiers.environments:VerifiersEnvironment"
_VERIFIERS_V1: Final = "vcpo_rollout.environments.verifiers.tasks:VerifiersTasks"
"""Stand behind `verifiers:PACKAGE`, by the interface that the installed library has."""
_ROLES: Final = ("system", "user", "assistant")


class Split(StrEnum):
    """Which of two disjoint sets of items a prompt comes from."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class Message(TypedDict):
    """One message of a prompt, as chat templates take it."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the model is asked, and what its environment needs to judge the response.

    Raises: ValueError for messages of another role, without text, or that nobody asks with.
    """

    text: str = ""
    """What the model is shown without a chat template; by default the messages' contents, an empty
    line between them."""

    messages: tuple[Message, ...] = field(default=(), hash=False)
    """What a chat template is given, the last from the user; none is the text as one user message.
    A list of dicts will do."""

    answer: str
    """The ground truth in the environment's private format; never shown to the model."""

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


class Environment(Protocol):
    """A task: a source of prompts and a judge of responses."""

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return prompt `index` (>= 0) of a split.

        The same seed, split and index give the same prompt. Two indices may give the same prompt,
        but no item is in both splits, whatever the seed.
        """
        ...

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return a finite reward, in the range that the task documents, for any response text."""
        ...


class Conversation(Protocol):
    """One exchange with the model under way, about one prompt."""

    def next_turn(self, response: str) -> str | None:
        """Hear a turn of the model's; return what it is told next, or None to end here.

        Every turn is heard, one that was cut at its longest too; what is returned is dropped when
        the model has no tokens left to say more.
        """
        ...

    def reward(self) -> float:
        """Judge what was heard: a finite number. Called once, at the end."""
        ...


@runtime_checkable
class MultiTurnEnvironment(Environment, Protocol):
    """A task that speaks with the model. Its `reward` judges a response in a single turn."""

    def converse(self, prompt: Prompt) -> Conversation:
        """Begin an exchange about a prompt; each answer to it has one of its own."""
        ...


@runtime_checkable
class SandboxedEnvironment(Environment, Protocol):
    """A task that runs programs of the model's."""

    def unprotected(self) -> tuple[str, ...]:
        """What this system does not let programs be kept from; `sandbox.runner` has the words."""
        ...


def make_environment(name: str, parameters: Mapping[str, object], seed: int) -> Environment:
    """Make the environment that a run names.

    name: a key of `BUILT_IN`, `package.module:Class`, or `verifiers:PACKAGE`. parameters: the
    task's own settings, as read from the run's YAML. Raises ValueError, naming the field, for a
    name that leads to no environment and for a parameter that the task does not know, lacks or
    refuses.
    """
    environment_class, arguments = find_environment(name, parameters)
    try:
        return cast("Environment", environment_class(**arguments, seed=seed))
    except ValueError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise ValueError(
            f"environment.parameters: {name!r} cannot be made with {dict(parameters)!r} "
            f"({type(error).__name__}: {error}); correct them, or the class"
        ) from error


def find_environment(
    name: str, parameters: Mapping[str, object]
) -> tuple[type, Mapping[str, object]]:
    """Find the class of an environment and check its parameters' names, without making one.

    Returns the class and its arguments but for the seed. Raises as `make_environment`.
    """
    library, _, package = name.partition(":")
    if library == "verifiers" and package:
        name, parameters = _verifiers_class(), {**parameters, "package": package}
    environment_class = _environment_class(name)
    _check_parameters(name, inspect.signature(environment_class), parameters)
    return environment_class, parameters


def import_from_run_folder(run: VCPORun) -> None:
    """Import environments of the user's own from where the run's file lay, before other places.

    That is where a relative model directory is looked for, too. In a cluster there is no such
    place, and they must be installed in the image.
    """
    folder = run.metadata.annotations.get(RUN_FOLDER_ANNOTATION)
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)


def _verifiers_class() -> str:
    try:
        return _VERIFIERS_V1 if find_spec("verifiers.v1") else _VERIFIERS
    except ImportError as error:
        raise ValueError(
            f"environment.name: 'verifiers:...' needs the package verifiers ({error}); install it "
            "in the rollout image: pip install 'vcpo[verifiers]' for packages with "
            "load_environment, 'vcpo[verifiers-v1]' for task sets"
        ) from error


def _implementation(name: str) -> str:
    return BUILT_IN[name].implementation if name in BUILT_IN else name


def _environment_class(name: str) -> type:
    module_name, _, class_name = _implementation(name).partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise ValueError(
            f"environment.name: {name!r} is unknown; use one of {', '.join(sorted(BUILT_IN))}, "
            "or package.module:Class for your own"
        )
    try:
        found = getattr(import_module(module_name), class_name)
    except Exception as error:  # importing runs foreign code, which may raise anything
        raise ValueError(
            f"environment.name: {name!r} cannot be imported ({type(error).__name__}: {error}); "
            "put its module beside the run's file, or install it (in a cluster, in the rollout "
            "image), and check the spelling"
        ) from error
    # Checked before the call: a name must not be a way to call just anything with arguments.
    if not (isinstance(found, type) and hasattr(found, "prompt") and hasattr(found, "reward")):
        raise ValueError(
            f"environment.name: {name!r} is not an environment; "
            "it must be a class with the methods prompt and reward"
        )
    return found


def _check_parameters(
    name: str, signature: inspect.Signature, parameters: Mapping[str, object]
) -> None:
    if "seed" in parameters:
        raise ValueError(
            f"environment.parameters.seed: {parameters['seed']!r} is not read here; "
            "remove it and set the run's seed instead"
        )
    try:
        signature.bind(**parameters, seed=0)
    except TypeError as error:
        known = ", ".join(sorted(set(signature.parameters) - {"seed"})) or "none"
        raise ValueError(
            f"environment.parameters: {dict(parameters)!r} does not suit {name!r} ({error}); "
            f"the known parameters are {known}"
        ) from error
