"""Programs in the sandbox, with limits that a busy machine does not reach."""

from examples.plugins.python_tool.python_tool.runner import (
    Sandbox,
    SandboxError,
    SandboxLimits,
    check_sandbox,
    run_python,
)


def run(source: str, sandbox: Sandbox = Sandbox.BUBBLEWRAP, **limits: float) -> str:
    """What a program says. The wall is far away: on a busy machine it gets little of its time."""
    settings = {"wall_s": 120.0, "cpu_s": 20, **limits}
    return run_python(source, SandboxLimits(**settings), sandbox)


def why_not(sandbox: Sandbox) -> str:
    """Why no program runs in a sandbox on this system; empty where they do."""
    try:
        check_sandbox(sandbox)
    except SandboxError as error:
        return str(error)
    return ""


def best_sandbox() -> Sandbox:
    """bubblewrap, or the pod where the system refuses it."""
    return Sandbox.POD if why_not(Sandbox.BUBBLEWRAP) else Sandbox.BUBBLEWRAP
