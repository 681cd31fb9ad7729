"""The environments that are shipped: their names, and the parameters that each one takes.

Kept here rather than read from the classes, so that a file can be checked where no rollout worker
is installed: by the operator, and by `vcpo validate`. A test holds it against the classes.
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
        "countdown": _built_in("countdown:Countdown", "numbers values targets operators style"),
        "gsm8k": _built_in("mathematics.gsm8k:Gsm8k", "path style"),
        "math": _built_in("mathematics.math_problems:MathProblems", "path style"),
        "python_tool": _built_in(
            "python_tool:PythonTool",
            "numbers values calls wall_seconds memory_mebibytes output_characters",
        ),
        "remote": _built_in(
            "remote:RemoteReward", "parameters timeout_seconds", "reward environment"
        ),
        "sort_digits": _built_in("sort_digits:SortDigits", "digits style"),
    }
)
"""By the short names that `environment.name` knows."""

Complaint = tuple[tuple[str, ...], object, str]
"""Where in the section `environment`, the value there, and what would be right."""


def environment_complaints(name: str, parameters: Mapping[str, Any]) -> Iterator[Complaint]:
    """What is wrong with an environment's name and parameters, as far as a file can tell.

    Classes of the user's own (`package.module:Class`) and packages of the verifiers library are
    known where they are installed only: of them nothing is said here.
    """
    if "seed" in parameters:
        message = "is not read here; remove it and set the run's `seed`"
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
    """What is wrong with the environment whose prompts a `remote` one gives away."""
    name, own = parameters.get("environment"), parameters.get("parameters") or {}
    if not isinstance(name, str) or not isinstance(own, Mapping):
        return  # the class itself says what it wants
    for (field, *rest), value, message in environment_complaints(name, own):
        place = ("environment",) if field == "name" else ("parameters", *rest)
        yield ("parameters", *place), value, message
