"""Checks the settings of a program's limits and sandbox, as read from YAML."""

import logging
from typing import Final

from vcpo_rollout.environments.parameters import parse_integer

from .runner import Sandbox, SandboxError, SandboxLimits, check_sandbox

_LOGGER = logging.getLogger(__name__)
_FIXES: Final = {
    Sandbox.BUBBLEWRAP: (
        "install bubblewrap 0.7 or newer and permit user namespaces (to a pod: by a sandboxed "
        "runtimeClassName or its seccompProfile), or set `sandbox: pod` if the pod itself is the "
        "sandbox"
    ),
    Sandbox.POD: "let the worker make folders in TMPDIR and start its own Python",
}


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
            f"{field} runs no program on this system ({error}); {_FIXES[sandbox]}"
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


def parse_seconds(field: str, value: object, *, highest: float) -> float:
    """Return seconds above 0 and up to `highest`; raise ValueError naming the field otherwise."""
    if type(value) not in (int, float) or not 0.0 < float(str(value)) <= highest:
        raise ValueError(
            f"environment.parameters.{field}: {value!r} is not a number of seconds "
            f"above 0 and up to {highest:g}"
        )
    return float(str(value))
