"""Runs Python that a model wrote in its own process, within limits on time, memory and files.

The child (`child.py`) gives up its rights before it runs the program, and documents how. This
module does what only the parent can do: it limits the time and the output, checks the size of the
program's folder where the system cannot limit it, and removes the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

_LOGGER = logging.getLogger(__name__)
_CHILD: Final = Path(__file__).parent / "child.py"
_NOBODY: Final = 65_534
"""User and group id without rights, which the child of a root process takes."""
_CHECK_S: Final = 0.1
"""How often the parent checks a folder's size, where the system cannot limit it."""
_MAX_FILES: Final = 4096
_MAX_PATH: Final = 256
"""Longest path within the folder, in characters, where the parent checks its size."""

PROTECTIONS: Final = ("network", "files", "sockets", "shared memory", "disk")
"""What a program cannot use if the system supports it: networks, files other than the
interpreter's, local sockets, memory shared with other processes, more disk than its limit."""

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


def run_python(source: str, limits: SandboxLimits) -> str:
    """Run a program; return its output, and the reason why it was stopped, if any.

    The program has the standard library and its working directory, the one folder it can write to.
    It has no input, no further process or thread, and no network if the system supports that.

    Raises: SandboxError when the system cannot run any program now, as on a full disk.
    """
    try:
        stop_reason, text = _run(source, limits, reports=False)
    except OSError as error:
        raise SandboxError(f"sandbox: a program cannot run: {error}") from error
    text = text.rstrip("\n")
    if len(text) > limits.output_characters:
        half = limits.output_characters // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    parts = [text, stop_reason]
    return "\n".join(part for part in parts if part)


@cache
def unprotected() -> tuple[str, ...]:
    """Return those of `PROTECTIONS` that this system does not support.

    Raises: OSError, with the child's last line, when no program can run on this system.
    """
    stop_reason, text = _run("", SandboxLimits(wall_s=60.0), reports=True)
    try:
        return tuple(json.loads(text))
    except json.JSONDecodeError as error:
        reason = stop_reason or text.strip().rpartition("\n")[2]
        raise OSError(f"sandbox: programs cannot run on this system: {reason}") from error


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


def _run(source: str, limits: SandboxLimits, *, reports: bool) -> tuple[str, str]:
    """Run the child; return why it was stopped (empty if it was not) and its output."""
    folder = tempfile.mkdtemp(prefix="vcpo-sandbox-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        settings = {
            **asdict(limits),
            "folder": folder,
            "nobody": _NOBODY,
            "parent": os.getpid(),
            "reports": reports,
        }
        is_watched = not reports and "disk" in unprotected()
        with tempfile.TemporaryFile() as output:
            stop_reason = _run_child(source, settings, output, limits, is_watched=is_watched)
            output.seek(0)
            return stop_reason, output.read(limits.file_bytes).decode(errors="replace")
    finally:
        # The model gets the program's output even if the folder cannot be removed.
        try:
            remove_folder(folder)
        except OSError as error:
            if not _FOLDERS_LEFT:
                _LOGGER.warning("sandbox: a program's folder cannot be removed: %s", error)
            _FOLDERS_LEFT.add(folder)


def _run_child(
    source: str,
    settings: dict[str, Any],
    output: IO[bytes],
    limits: SandboxLimits,
    *,
    is_watched: bool,
) -> str:
    """Run the child process; return why it was stopped, empty if it was not.

    is_watched: check the folder's size, where the system cannot limit it.
    """
    process = subprocess.Popen(  # noqa: S603 - the purpose of this module
        # Without this process's environment, packages and modules.
        [sys.executable, "-I", "-S", "-B", str(_CHILD), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=settings["folder"],
        env={"TMPDIR": settings["folder"], "HOME": settings["folder"], "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    ends_s = time.monotonic() + limits.wall_s
    text: bytes | None = source.encode(errors="replace")
    try:
        while (left_s := ends_s - time.monotonic()) > 0:
            try:
                process.communicate(text, timeout=min(left_s, _CHECK_S) if is_watched else left_s)
            except subprocess.TimeoutExpired:
                text = None  # already written
                if is_watched and _is_larger(settings["folder"], limits.disk_bytes):
                    return f"[stopped: its files exceed {limits.disk_bytes:,} bytes]"
            else:
                return _describe_status(process.returncode, limits)
        return f"[stopped: still running after {limits.wall_s:g} s]"
    finally:
        # The whole session, in case the program evaded the limit on processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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


def _describe_status(status: int, limits: SandboxLimits) -> str:
    if status == -signal.SIGXCPU:
        return f"[stopped: used more than {limits.cpu_s} s of CPU time]"
    if status < 0:
        return f"[stopped: {signal.Signals(-status).name}]"
    return ""
