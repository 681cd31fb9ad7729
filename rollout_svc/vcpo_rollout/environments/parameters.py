"""Checks a task's parameters, as read from YAML, and converts them to typed values."""

import logging
from enum import StrEnum
from typing import Final

from vcpo_rollout.sandbox.runner import Sandbox, SandboxError, SandboxLimits, check_sandbox

_LOGGER = logging.getLogger(__name__)
_CURES: Final = {
    Sandbox.BUBBLEWRAP: (
        "install bubblewrap 0.7 or newer and permit user namespaces (to a pod: by a sandboxed "
        "runtimeClassName or its seccompProfile), or set `sandbox: pod` if the pod itself is the "
        "sandbox; see docs/environments.md"
    ),
    Sandbox.POD: "let the worker make folders in TMPDIR and start its own Python",
}


class Style(StrEnum):
    """The wording of a prompt."""

    PLAIN = "plain"
    """A bare formula, for a character-level model that was trained on nothing else."""

    INSTRUCT = "instruct"
    """A sentence with the task and the way to mark the answer, for an instruct model."""


def parse_style(value: object) -> Style:
    """Return the style of that name; raise ValueError with the known names otherwise."""
    if value not in tuple(Style):
        raise ValueError(
            f"environment.parameters.style: {value!r} is unknown; use one of {', '.join(Style)}"
        )
    return Style(str(value))


def parse_sandbox(value: object) -> Sandbox:
    """Return the sandbox of that name, in which a first program has run.

    Raises ValueError, naming the field, for another name, and where no program can run in it.
    """
    field = f"environment.parameters.sandbox: {str(value)!r}"
    if value not in tuple(Sandbox):
        raise ValueError(f"{field} is unknown; use one of {', '.join(Sandbox)}")
    sandbox = Sandbox(str(value))
    try:
        check_sandbox(sandbox)
    except SandboxError as error:
        raise ValueError(
            f"{field} runs no program on this system ({error}); {_CURES[sandbox]}"
        ) from error
    if sandbox is Sandbox.POD:
        _LOGGER.warning(
            "programs can reach the worker's keys, files and network, because the run says that"
            " its pod is the sandbox (sandbox: pod)"
        )
    return sandbox


def parse_limits(
    wall_seconds: object, memory_mebibytes: object, *, output_characters: int = 2000
) -> SandboxLimits:
    """Return the limits of programs; raise ValueError, naming the field, for one out of bounds."""
    wall_s = parse_seconds("wall_seconds", wall_seconds, highest=600.0)
    memory = parse_integer("memory_mebibytes", memory_mebibytes, lowest=64, highest=65_536)
    return SandboxLimits(
        wall_s=wall_s,
        cpu_s=max(1, round(wall_s)),
        memory_bytes=memory << 20,
        output_characters=output_characters,
    )


def parse_integer(field: str, value: object, *, lowest: int, highest: int) -> int:
    """Return an integer within [lowest, highest]; raise ValueError naming the field otherwise."""
    # Python treats bool as int, and `digits: true` in a YAML file is a mistake.
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is not an integer "
            f"from {lowest} to {highest}"
        )
    return value


def parse_span(field: str, value: object, *, lowest: int, highest: int) -> tuple[int, int]:
    """Return (smallest, largest), both inclusive, from a pair or from one number.

    Raises ValueError, naming the field, unless lowest <= smallest <= largest <= highest.
    """
    ends = (value, value) if isinstance(value, int) else value
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is neither an integer "
            "nor a pair [smallest, largest]"
        )
    smallest, largest = (parse_integer(field, end, lowest=lowest, highest=highest) for end in ends)
    if smallest > largest:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is empty; "
            "put the smaller number of the pair first"
        )
    return smallest, largest


def parse_path(value: object) -> str | None:
    """Return the path of a data set, or None; raise ValueError if it is not a text."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(
            f"environment.parameters.path: {value!r} is not a path; "
            "give a .jsonl or .parquet file or a folder, or remove it to load from the hub"
        )
    return value


def parse_seconds(field: str, value: object, *, highest: float) -> float:
    """Return seconds above 0 and up to `highest`; raise ValueError naming the field otherwise."""
    if type(value) not in (int, float) or not 0.0 < float(str(value)) <= highest:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is not a number of seconds "
            f"above 0 and up to {highest:g}"
        )
    return float(str(value))
