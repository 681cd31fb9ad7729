"""Runs Python that a model wrote: in a process of its own, within limits, and never for long.

The child (`sandbox_child.py`) takes its own rights away before it runs a line of the text: it
documents how. Here is what only the parent can do: a time limit, a bound on what is printed, and a
folder that goes when the child does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

_CHILD: Final = Path(__file__).parent / "sandbox_child.py"
_NOBODY: Final = 65_534
"""Whom a child becomes whose parent may do anything: user and group without any right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    wall_s: float = 5.0
    """Time from its start."""
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    """Address space, the interpreter's own included (about 30 MiB)."""
    file_bytes: int = 1 << 20
    """Size of each file that it writes, and of what it prints."""
    output_characters: int = 2000
    """Of what it prints; the middle of more is left out."""


def run_python(source: str, limits: SandboxLimits) -> str:
    """Run a program and return what it printed, followed by the error that ended it, if any.

    The program has the standard library, no input, no network where the system can take it away,
    no processes or threads besides its own, and one folder to write to, its working directory.
    """
    status, text = _run(source, limits, reports=False)
    ending = _ending(status, limits)
    parts = [_shortened(text.rstrip("\n"), limits.output_characters), ending]
    return "\n".join(part for part in parts if part)


@cache
def unprotected() -> tuple[str, ...]:
    """What this system does not let a program be kept from: `network`, `files`, both or none."""
    _, text = _run("", SandboxLimits(wall_s=60.0), reports=True)
    return tuple(json.loads(text))


def _run(source: str, limits: SandboxLimits, *, reports: bool) -> tuple[int | None, str]:
    """Status as `_status`, and what was printed."""
    with tempfile.TemporaryDirectory(prefix="vcpo-sandbox-") as folder:
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        settings = {**asdict(limits), "folder": folder, "nobody": _NOBODY, "reports": reports}
        with tempfile.TemporaryFile() as printed:
            status = _status(source, settings, printed)
            printed.seek(0)
            return status, printed.read(limits.file_bytes).decode(errors="replace")


def _status(source: str, settings: dict[str, Any], printed: IO[bytes]) -> int | None:
    """Exit status, negative for a signal; None when the program was still running at its limit."""
    process = subprocess.Popen(  # noqa: S603 - that is what it is for
        # Isolated from this process's environment, packages and modules.
        [sys.executable, "-I", "-S", "-B", str(_CHILD), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=printed,
        stderr=subprocess.STDOUT,
        cwd=settings["folder"],
        env={"TMPDIR": settings["folder"], "HOME": settings["folder"], "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        process.communicate(source.encode(errors="replace"), timeout=settings["wall_s"])
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Its whole session, should it have got around the limit on processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode


def _ending(status: int | None, limits: SandboxLimits) -> str:
    if status is None:
        return f"[stopped: still running after {limits.wall_s:g} s]"
    if status == -signal.SIGXCPU:
        return f"[stopped: used more than {limits.cpu_s} s of CPU time]"
    if status < 0:
        return f"[stopped: {signal.Signals(-status).name}]"
    return ""


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
