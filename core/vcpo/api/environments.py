"""Names and parameters of the environments and rewards that are shipped.

The lists do not read the classes, so that the operator and `vcpo validate` can check a file without
the rollout worker's packages. A test compares the lists with the classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """One environment or reward of the rollout service."""

    implementation: str
    """`package.module:Class` in the rollout service."""
    parameters: frozenset[str] = frozenset()
    """Its parameters, all with a default, without the run's `seed`."""


def _built_in(class_path: str, parameters: str) -> BuiltIn:
    return BuiltIn(
        implementation=f"vcpo_rollout.environments.{class_path}",
        parameters=frozenset(parameters.split()),
    )


BUILT_IN: Final[Mapping[str, BuiltIn]] = MappingProxyType(
    {
        "countdown": _built_in("countdown:Countdown", "numbers values targets operators style"),
        "data_set": _built_in(
            "own_data_set:OwnDataSet", "path hub config prompt answer instruction examples"
        ),
        "gsm8k": _built_in("mathematics.tasks:Gsm8k", "path style"),
        "math": _built_in("mathematics.tasks:MathProblems", "path style"),
        "sort_digits": _built_in("sort_digits:SortDigits", "digits style"),
    }
)
"""Shipped environments by the short name that `environment.name` takes."""

OWN_REWARD: Final = "environment"
"""Name of the reward that the environment itself gives, among `environment.rewards`."""

BUILT_IN_REWARDS: Final[Mapping[str, BuiltIn]] = MappingProxyType(
    {OWN_REWARD: BuiltIn(implementation="")}
)
"""Shipped rewards by the short name that `environment.rewards[].name` takes."""

Complaint = tuple[tuple[str, ...], object, str]
"""Place in a section with `name` and `parameters`, the value there, and the fix."""


def environment_complaints(name: str, parameters: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield what is wrong with an environment's name and parameters.

    A class of the user's own (`package.module:Class`) or of the verifiers library is not checked:
    only the rollout worker has it installed.
    """
    if "seed" in parameters:
        message = "is not a parameter; remove it and set the run's `seed`"
        yield ("parameters", "seed"), parameters["seed"], message
    own = {key: value for key, value in parameters.items() if key != "seed"}
    yield from _complaints(name, own, BUILT_IN, "package.module:Class")


def reward_complaints(name: str, parameters: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield what is wrong with a reward's name and parameters; not of a user's own function."""
    yield from _complaints(name, parameters, BUILT_IN_REWARDS, "package.module:function")


def _complaints(
    name: str, parameters: Mapping[str, Any], shipped: Mapping[str, BuiltIn], own: str
) -> Iterator[Complaint]:
    """Yield what is wrong with a name, and with the parameters of what is shipped.

    own: how a file names the user's own.
    """
    if ":" in name:
        return
    if name not in shipped:
        known = ", ".join(sorted(shipped))
        yield ("name",), name, f"is unknown; use one of {known}, or {own} for your own"
        return
    known = ", ".join(sorted(shipped[name].parameters)) or "none"
    for parameter in sorted(set(parameters) - shipped[name].parameters):
        message = f"'{name}' has no such parameter; it takes {known}"
        yield ("parameters", parameter), parameters[parameter], message
