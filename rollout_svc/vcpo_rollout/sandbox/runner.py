"""Runs Python that a model wrote: in a process of its own, within limits, and never for long.

The child (`sandbox_child.py`) takes its own rights away before it runs a line of the text: it
documents how. Here is what only the parent can do: a time limit, a bound on what is printed, a
look at the folder's size where the system does not limit it, and its removal.
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
"""Whom a child becomes whose parent may do anything: user and group without any right."""
_LOOK_S: Final = 0.1
"""How often the size of a folder is looked at, where it has to be."""
_MAX_FILES: Final = 4096
_MAX_PATH: Final = 256
"""Characters of a path within the folder, where its size has to be looked at."""

PROTECTIONS: Final = ("network", "files", "sockets", "shared memory", "disk")
"""What a program is kept from where the system lets it: a network, files but the interpreter's,
local sockets, memory shared with other processes, and at every moment more files than its limit."""

_FOLDERS_LEFT: Final[set[str]] = set()
"""Those that could not be removed; the first is written of, all are counted."""


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
    disk_bytes: int = 64 << 20
    """Size of all files together."""
    output_characters: int = 2000
    """Of what it prints; the middle of more is left out."""


def run_python(source: str, limits: SandboxLimits) -> str:
    """Run a program and return what it printed, followed by the error that ended it, if any.

    The program has the standard library, no input, no network where the system can take it away,
    no processes or threads besides its own, and one folder to write to, its working directory.
    """
    ending, text = _run(source, limits, reports=False)
    parts = [_shortened(text.rstrip("\n"), limits.output_characters), ending]
    return "\n".join(part for part in parts if part)


@cache
def unprotected() -> tuple[str, ...]:
    """What this system does not let a program be kept from; of `PROTECTIONS`.

    Raises: OSError when no program can be run here at all, with what the child said last.
    """
    ending, text = _run("", SandboxLimits(wall_s=60.0), reports=True)
    try:
        return tuple(json.loads(text))
    except json.JSONDecodeError as error:
        said = ending or text.strip().rpartition("\n")[2]
        raise OSError(f"sandbox: programs cannot be run on this system: {said}") from error


def num_folders_left() -> int:
    """How many folders of programs this process could not remove."""
    return len(_FOLDERS_LEFT)


def remove_folder(folder: str) -> None:
    """Remove a folder that a program had to itself.

    It may be deeper than any path is long, than Python calls, and than there are descriptors: this
    goes down and up step by step. The program may have locked any of it: each folder is opened to
    its owner before it is entered.

    Raises: OSError when the system does not allow it, as where the folder above is locked.
    """
    Path(folder).chmod(0o700)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        way: list[str] = []
        to_remove = [_remove_files(here)]
        while to_remove:
            if to_remove[-1]:
                way.append(to_remove[-1].pop())
                here = _step(here, way[-1])
                to_remove.append(_remove_files(here))
            else:
                to_remove.pop()
                if way:
                    here = _step(here, "..")
                    os.rmdir(way.pop(), dir_fd=here)
    finally:
        os.close(here)
    Path(folder).rmdir()


def _step(here: int, name: str) -> int:
    """Go from a folder to one beside it; returns its descriptor."""
    there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    os.close(here)
    return there


def _remove_files(here: int) -> list[str]:
    """Remove a folder's files; returns its folders, each opened to its owner."""
    folders = []
    for name in os.listdir(here):
        if stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
            os.chmod(name, 0o700, dir_fd=here)
            folders.append(name)
        else:
            os.unlink(name, dir_fd=here)
    return folders


def _run(source: str, limits: SandboxLimits, *, reports: bool) -> tuple[str, str]:
    """What ended the program before its end, empty for nothing, and what was printed."""
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
        watched = not reports and "disk" in unprotected()
        with tempfile.TemporaryFile() as printed:
            ending = _ending(source, settings, printed, limits, watched=watched)
            printed.seek(0)
            return ending, printed.read(limits.file_bytes).decode(errors="replace")
    finally:
        # What a program did to its folder must not cost the model the program's output.
        try:
            remove_folder(folder)
        except OSError as error:
            if not _FOLDERS_LEFT:
                _LOGGER.warning("sandbox: a program's folder cannot be removed: %s", error)
            _FOLDERS_LEFT.add(folder)


def _ending(
    source: str,
    settings: dict[str, Any],
    printed: IO[bytes],
    limits: SandboxLimits,
    *,
    watched: bool,
) -> str:
    """Run the program; watched: its folder's size too, where the system does not limit it."""
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
    ends_s = time.monotonic() + limits.wall_s
    text: bytes | None = source.encode(errors="replace")
    try:
        while (left_s := ends_s - time.monotonic()) > 0:
            try:
                process.communicate(text, timeout=min(left_s, _LOOK_S) if watched else left_s)
            except subprocess.TimeoutExpired:
                text = None  # it is on its way
                if watched and _is_larger(settings["folder"], limits.disk_bytes):
                    return f"[stopped: wrote more files than {limits.disk_bytes:,} bytes hold]"
            else:
                return _signalled(process.returncode, limits)
        return f"[stopped: still running after {limits.wall_s:g} s]"
    finally:
        # Its whole session, should it have got around the limit on processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _is_larger(folder: str, limit_bytes: int) -> bool:
    """Whether files take more than they may; too many count, too deep and hidden ones too."""
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
    except FileNotFoundError:  # removed meanwhile: the next look tells
        return False
    except OSError:
        return True
    return False


def _signalled(status: int, limits: SandboxLimits) -> str:
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
