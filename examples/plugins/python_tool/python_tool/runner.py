"""Runs Python that a model wrote in a process of its own, with limits on time, memory and files.

bubblewrap (https://github.com/containers/bubblewrap) isolates the process: a root folder that holds
the interpreter alone, process ids of its own, no network, no shared memory, and a folder in memory
that ends with it. Where the pod itself is the sandbox, the process has the limits only.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final

from .child import NOBODY

_CHILD: Final = Path(__file__).parent / "child.py"
_FOLDER: Final = "/tmp"
_READABLE: Final = (
    sys.base_prefix,
    sys.base_exec_prefix,
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)
"""The interpreter's own files and what it needs of the system; a program reads nothing else."""
_DEVICES: Final = ("/dev/null", "/dev/urandom")


class Sandbox(StrEnum):
    """What isolates a program from its worker and the rest."""

    BUBBLEWRAP = "bubblewrap"
    POD = "pod"
    """Nothing within the pod, which is the sandbox itself, as one of gVisor or Kata is."""


class SandboxError(OSError):
    """The system could not run a program; the program itself is not at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The limits of a program."""

    wall_s: float = 5.0
    """Wall-clock time from its start, in seconds."""
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    """Address space, including the interpreter's own (about 30 MiB)."""
    file_bytes: int = 1 << 20
    """Size of each file that it writes, and of its output."""
    disk_bytes: int = 64 << 20
    """Size of all its files together, under bubblewrap."""
    output_characters: int = 2000
    """Length of the returned output; the middle of a longer output is left out."""


def run_python(source: str, limits: SandboxLimits, sandbox: Sandbox) -> str:
    """Run a program; return its output, and the reason why it was stopped, if any.

    The program has the standard library, an empty folder that it can write to, no input, and no
    further process or thread.

    Raises: SandboxError when the system cannot run any program now, as without bubblewrap.
    """
    try:
        stop_reason, text = _run(source, limits, sandbox)
    except OSError as error:
        raise SandboxError(f"sandbox: a program cannot run: {error}") from error
    text = text.rstrip("\n")
    if len(text) > limits.output_characters:
        half = limits.output_characters // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return "\n".join(part for part in (text, stop_reason) if part)


@cache
def check_sandbox(sandbox: Sandbox) -> None:
    """Run a first program.

    Raises: SandboxError, with the reason, when no program can run in this sandbox on this system.
    """
    said = run_python("print('runs')", SandboxLimits(wall_s=60.0), sandbox)
    if said != "runs":
        raise SandboxError(f"sandbox: a program cannot run: {said}")


def _run(source: str, limits: SandboxLimits, sandbox: Sandbox) -> tuple[str, str]:
    """Run the child; return why it was stopped (empty if it was not) and its output."""
    with _folder(sandbox) as folder, tempfile.TemporaryFile() as output:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    child_command(limits, sandbox, theirs.fileno()),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={"TMPDIR": folder, "HOME": folder, "LANG": "C.UTF-8"},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            stop_reason = _wait(process, source, limits, sandbox)
            ours.setblocking(False)
            has_begun = False
            with contextlib.suppress(BlockingIOError):  # a child that is being killed has it open
                has_begun = bool(ours.recv(1))
        output.seek(0)
        text = output.read(limits.file_bytes).decode(errors="replace")
    if not has_begun and not stop_reason:
        raise OSError(text.strip().rpartition("\n")[2] or "the child ended without a word")
    return stop_reason, text


def _wait(
    process: subprocess.Popen[bytes], source: str, limits: SandboxLimits, sandbox: Sandbox
) -> str:
    """Wait for the end of the process, and end it; return why, empty if it ended by itself."""
    try:
        process.communicate(source.encode(errors="replace"), timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        return f"[stopped: still running after {limits.wall_s:g} s]"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return _describe(process.returncode, limits, sandbox)


def child_command(limits: SandboxLimits, sandbox: Sandbox, worker_socket: int) -> list[str]:
    """Return the words that start the child.

    worker_socket: descriptor of a socket, over which the child says that its program begins.
    """
    settings = {
        "worker_socket": worker_socket,
        "limits": {
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
        },
    }
    # The interpreter itself, without this process's environment, packages and modules.
    python = [str(Path(sys.executable).resolve()), "-I", "-S", "-B", "-c", _CHILD.read_text()]
    wrapper = _bubblewrap(limits.disk_bytes) if sandbox is Sandbox.BUBBLEWRAP else ()
    return [*wrapper, *python, json.dumps(settings)]


def _bubblewrap(disk_bytes: int) -> list[str]:
    # Otherwise they get the modes of the system's, and nobody may not enter root's home.
    parents = reversed(Path(sys.base_prefix).parents)
    return [
        shutil.which("bwrap") or "bwrap",
        "--die-with-parent",
        *(f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")),
        *("--perms", "0777", "--size", str(disk_bytes), "--tmpfs", _FOLDER),
        *(word for path in parents for word in ("--perms", "0755", "--dir", str(path))),
        *(word for path in _READABLE for word in ("--ro-bind-try", path, path)),
        # Devices are bound one by one: bubblewrap's own /dev is a folder of unlimited size.
        *(word for path in _DEVICES for word in ("--dev-bind-try", path, path)),
        *("--remount-ro", "/", "--chdir", _FOLDER, "--"),
    ]


@contextlib.contextmanager
def _folder(sandbox: Sandbox) -> Iterator[str]:
    """The folder in which a program starts, under the path that the program sees."""
    if sandbox is Sandbox.BUBBLEWRAP:  # which makes one in memory
        yield _FOLDER
        return
    folder = tempfile.mkdtemp(prefix="vcpo-program-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder
    finally:
        # It may be deeper than Python calls. What the program closed to its owner stays.
        remove = ["/bin/rm", "-rf", folder]
        subprocess.run(remove, stderr=subprocess.DEVNULL, check=False)


def _describe(status: int, limits: SandboxLimits, sandbox: Sandbox) -> str:
    """Return why a process with this exit status was stopped, empty if it ended by itself.

    bubblewrap ends with 128 and the number of the signal that ended its command.
    """
    number = status - 128 if sandbox is Sandbox.BUBBLEWRAP and status >= 0 else -status
    if number == signal.SIGXCPU:
        return f"[stopped: used more than {limits.cpu_s} s of CPU time]"
    if number < 1:
        return ""
    names = {one.value: one.name for one in signal.Signals}  # a few signals have no name
    return f"[stopped: {names.get(number, f'signal {number}')}]"
