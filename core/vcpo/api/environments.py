"""Names and parameters of the environments that are shipped.

The list does not read the environments' classes, so that the operator and `vcpo validate` can check
a file without the rollout worker's packages. A test compares the list with the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInEnvironment:
    """One environment of the rollout service."""

    implementation: str
    """`package.module:Class` in the rollout service."""
    optional: frozenset[str] = frozenset()
    """Parameters with a default, without the run's `seed`."""
    required: frozenset[str] = frozenset()
    """Parameters without one."""


def _built_in(class_path: str, optional: str, required: str = "") -> BuiltInEnvironment:
    return BuiltInEnvironment(
        implementation=f"vcpo_rollout.environments.{class_path}",
        optional=frozenset(optional.split()),
        required=frozenset(required.split()),
    )


BUILT_IN: Final[Mapping[str, BuiltInEnvironment]] = MappingProxyType(
    {
        "calculator": _built_in("calculator:Calculator", "letters terms values calls style"),
        "countdown": _built_in("countdown:Countdown", "numbers values targets operators style"),
        "gsm8k": _built_in("mathematics.tasks:Gsm8k", "path style"),
        "math": _built_in("mathematics.tasks:MathProblems", "path style"),
        "python_tool": _built_in(
            "python_tool:PythonTool",
            "numbers values calls wall_seconds memory_mebibytes output_characters sandbox",
        ),
        "remote": _built_in(
            "remote:RemoteReward",
            "parameters timeout_seconds authority plain_text",
            "reward environment",
        ),
        "sort_digits": _built_in("sort_digits:SortDigits", "digits style"),
    }
)
"""Shipped environments by the short name that `environment.name` takes."""

Complaint = tuple[tuple[str, ...], object, str]
"""Place in the section `environment`, the value there, and the cure."""


def environment_complaints(name: str, parameters: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield what is wrong with an environment's name and parameters.

    A class of the user's own (`package.module:Class`) or of the verifiers library is not checked:
    only the rollout worker has it installed.
    """
    if "seed" in parameters:
        message = "is not a parameter; remove it and set the run's `seed`"
        yield ("parameters", "seed"), parameters["seed"], message
    if ":" in name:
        return
    if name not in BUILT_IN:
        known = ", ".join(sorted(BUILT_IN))
        message = f"is unknown; use one of {known}, or package.module:Class for your own"
        yield ("name",), name, message
        return
    task = BUILT_IN[name]
    known = ", ".join(sorted(task.optional | task.required))
    for parameter in sorted(set(parameters) - task.optional - task.required - {"seed"}):
        message = f"'{name}' has no such parameter; it takes {known}"
        yield ("parameters", parameter), parameters[parameter], message
    for parameter in sorted(task.required - set(parameters)):
        yield ("parameters",), dict(parameters), f"'{name}' needs the parameter `{parameter}`"
    if name == "remote":
        yield from _complaints_within(parameters)


def _complaints_within(parameters: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield what is wrong with the environment whose prompts a `remote` environment uses."""
    name, own = parameters.get("environment"), parameters.get("parameters") or {}
    if not isinstance(name, str) or not isinstance(own, Mapping):
        return  # the class refuses it with a message of its own
    for (field, *rest), value, message in environment_complaints(name, own):
        place = ("environment",) if field == "name" else ("parameters", *rest)
        yield ("parameters", *place), value, message
