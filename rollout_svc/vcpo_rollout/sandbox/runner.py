"""Runs Python that a model wrote in its own process, within limits on time, memory and files.

The child (`child.py`) gives up its rights before it runs the program, and documents how. This
module does what only the parent can do: it starts the child in bubblewrap if the system can, limits
the time and the output, checks the size of the program's folder where the system cannot limit it,
and removes the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Final

from vcpo.metrics.label_values import SandboxMechanism
from vcpo_rollout.sandbox.bubblewrap import bubblewrap_command, find_bubblewrap

_LOGGER = logging.getLogger(__name__)
_CHILD: Final = Path(__file__).parent / "child.py"
NOBODY: Final = 65_534
"""User and group id without rights, which the child of a root process takes."""
_CHECK_S: Final = 0.1
"""How often the parent checks a folder's size, where the system cannot limit it."""
_MAX_FILES: Final = 4096
_MAX_PATH: Final = 256
"""Longest path within the folder, in characters, where the parent checks its size."""

READABLE: Final = (
    sys.base_prefix,
    sys.base_exec_prefix,
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)
"""The interpreter's own files and what it needs of the system; a program reads nothing else."""

PROTECTIONS: Final = ("network", "files", "sockets", "processes", "shared memory", "disk")
"""What a program cannot use if the system supports it: networks; files other than the
interpreter's, and their modes, owners and times; local sockets; other processes, their limits and
their priority; memory shared with them; more disk than its limit."""

_FOLDERS_LEFT: Final[set[str]] = set()
"""Folders that could not be removed; the first one is logged, all are counted."""


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
    """Size of all its files together."""
    output_characters: int = 2000
    """Length of the returned output; the middle of a longer output is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """How this system isolates programs."""

    mechanism: SandboxMechanism
    missing: tuple[str, ...]
    """Those of `PROTECTIONS` that the system does not support."""


def run_python(source: str, limits: SandboxLimits) -> str:
    """Run a program; return its output, and the reason why it was stopped, if any.

    The program has the standard library and its working directory, the one folder it can write to.
    It has no input, no further process or thread, and no network if the system supports that.

    Raises: SandboxError when the system cannot run any program now, as on a full disk.
    """
    try:
        how = isolation()
        is_wrapped = how.mechanism is SandboxMechanism.BUBBLEWRAP
        stop_reason, text = _run(
            source,
            limits,
            bubblewrap=find_bubblewrap() if is_wrapped else None,
            is_watched="disk" in how.missing,
        )
    except OSError as error:
        raise SandboxError(f"sandbox: a program cannot run: {error}") from error
    text = text.rstrip("\n")
    if len(text) > limits.output_characters:
        half = limits.output_characters // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    parts = [text, stop_reason]
    return "\n".join(part for part in parts if part)


@cache
def isolation() -> Isolation:
    """Return how this system isolates programs, found out by a child in each mechanism.

    Raises: OSError, with the child's last line, when no program can run on this system.
    """
    bubblewrap = find_bubblewrap()
    if bubblewrap is not None:
        try:
            return _probe(bubblewrap)
        except OSError as error:
            _LOGGER.info("sandbox: bubblewrap does not work on this system: %s", error)
    try:
        return _probe(None)
    except OSError as error:
        raise OSError(f"sandbox: programs cannot run on this system: {error}") from error


def _probe(bubblewrap: str | None) -> Isolation:
    """Return the isolation by one mechanism, as a child reports it.

    Raises: OSError, with the reason, when no child runs by it.
    """
    limits = SandboxLimits(wall_s=60.0)
    stop_reason, text = _run("", limits, bubblewrap=bubblewrap, is_watched=False, reports=True)
    if stop_reason:
        raise OSError(stop_reason)
    report = json.loads(text)
    own = SandboxMechanism.NAMESPACES if report["has_namespaces"] else SandboxMechanism.FILTERS
    return Isolation(
        mechanism=own if bubblewrap is None else SandboxMechanism.BUBBLEWRAP,
        missing=tuple(report["missing"]),
    )


def num_folders_left() -> int:
    """Return how many folders of programs this process could not remove."""
    return len(_FOLDERS_LEFT)


def remove_folder(folder: str) -> None:
    """Remove a program's folder with all its content.

    Its depth may exceed the longest path, Python's recursion limit and the number of open files, so
    the function walks one level at a time and holds one descriptor. The program may have revoked
    permissions, so each folder's owner gets them back first.

    Raises: OSError when the system refuses, as where the parent folder is read-only.
    """
    Path(folder).chmod(0o700)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path: list[str] = []
        to_remove = [_remove_files(here)]
        while to_remove:
            if to_remove[-1]:
                path.append(to_remove[-1].pop())
                here = _enter(here, path[-1])
                to_remove.append(_remove_files(here))
            else:
                to_remove.pop()
                if path:
                    here = _enter(here, "..")
                    os.rmdir(path.pop(), dir_fd=here)
    finally:
        os.close(here)
    Path(folder).rmdir()


def _enter(here: int, name: str) -> int:
    """Open the folder `name` seen from `here` and close `here`; return the new descriptor."""
    there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    os.close(here)
    return there


def _remove_files(here: int) -> list[str]:
    """Remove a folder's files; return its subfolders, to which the owner has access again."""
    folders = []
    for name in os.listdir(here):
        if stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
            os.chmod(name, 0o700, dir_fd=here)
            folders.append(name)
        else:
            os.unlink(name, dir_fd=here)
    return folders


def _run(
    source: str,
    limits: SandboxLimits,
    *,
    bubblewrap: str | None,
    is_watched: bool,
    reports: bool = False,
) -> tuple[str, str]:
    """Run the child; return why it was stopped (empty if it was not) and its output.

    bubblewrap: its path; None starts the child without it.
    is_watched: check the folder's size, where the system cannot limit it.
    reports: the child reports the protections that are missing, and runs no program.

    Raises: OSError, with the child's last line, when it ended before its program began.
    """
    folder = tempfile.mkdtemp(prefix="vcpo-sandbox-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        child = _Child(
            source=source,
            folder=folder,
            limits=limits,
            bubblewrap=bubblewrap,
            is_watched=is_watched,
            reports=reports,
        )
        with tempfile.TemporaryFile() as output:
            has_begun, stop_reason = child.run(output)
            output.seek(0)
            text = output.read(limits.file_bytes).decode(errors="replace")
        if not has_begun and not stop_reason:
            raise OSError(text.strip().rpartition("\n")[2] or "the child ended without a word")
        return stop_reason, text
    finally:
        # The model gets the program's output even if the folder cannot be removed.
        try:
            remove_folder(folder)
        except OSError as error:
            if not _FOLDERS_LEFT:
                _LOGGER.warning("sandbox: a program's folder cannot be removed: %s", error)
            _FOLDERS_LEFT.add(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """The process that runs one program; the arguments of `_run`."""

    source: str
    folder: str
    limits: SandboxLimits
    bubblewrap: str | None
    is_watched: bool
    reports: bool

    def run(self, output: IO[bytes]) -> tuple[bool, str]:
        """Run it; return whether its program began, and why it was stopped, empty if it was not."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(  # noqa: S603 - the purpose of this module
                    self._command(theirs.fileno()),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env={"TMPDIR": self.folder, "HOME": self.folder, "LANG": "C.UTF-8"},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            try:
                stop_reason = self._wait(process)
            finally:
                # The whole session, in case the program evaded the limit on processes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # a child that is being killed has it open
                return bool(ours.recv(1)), stop_reason
            return False, stop_reason

    def _command(self, worker_socket: int) -> list[str]:
        settings = {
            **asdict(self.limits),
            "folder": self.folder,
            "nobody": NOBODY,
            "readable": READABLE,
            "own_root": self.bubblewrap is not None,
            "worker_socket": worker_socket,
            "reports": self.reports,
        }
        # The interpreter itself, without this process's environment, packages and modules.
        python = [str(Path(sys.executable).resolve()), "-I", "-S", "-B", str(_CHILD)]
        command = [*python, json.dumps(settings)]
        if self.bubblewrap is None:
            return command
        wrapper = bubblewrap_command(
            self.bubblewrap,
            folder=self.folder,
            disk_bytes=self.limits.disk_bytes,
            readable=(*READABLE, str(_CHILD)),
        )
        return [*wrapper, *command]

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the end of the process; return why it must be stopped, empty if it ended."""
        ends_s = time.monotonic() + self.limits.wall_s
        text: bytes | None = self.source.encode(errors="replace")
        while (left_s := ends_s - time.monotonic()) > 0:
            timeout_s = min(left_s, _CHECK_S) if self.is_watched else left_s
            try:
                process.communicate(text, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                text = None  # already written
                if self.is_watched and _is_larger(self.folder, self.limits.disk_bytes):
                    return f"[stopped: its files exceed {self.limits.disk_bytes:,} bytes]"
            else:
                return self._describe(process.returncode)
        return f"[stopped: still running after {self.limits.wall_s:g} s]"

    def _describe(self, status: int) -> str:
        """Return why a process with this exit status was stopped, empty if it ended by itself.

        bubblewrap ends with 128 and the number of the signal that ended its command.
        """
        number = -status if status < 0 or self.bubblewrap is None else status - 128
        if number == signal.SIGXCPU:
            return f"[stopped: used more than {self.limits.cpu_s} s of CPU time]"
        if number < 1:
            return ""
        names = {one.value: one.name for one in signal.Signals}  # a few signals have no name
        return f"[stopped: {names.get(number, f'signal {number}')}]"


def _is_larger(folder: str, limit_bytes: int) -> bool:
    """Whether a folder exceeds its limit in bytes, in files or in depth, or cannot be read."""
    total_bytes = num_files = 0
    folders = [folder]
    longest = len(folder) + _MAX_PATH
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    total_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    num_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if total_bytes > limit_bytes or num_files > _MAX_FILES:
                        return True
                    if len(entry.path) > longest:
                        return True
    except FileNotFoundError:  # removed in the meantime: the next check decides
        return False
    except OSError:
        return True
    return False
