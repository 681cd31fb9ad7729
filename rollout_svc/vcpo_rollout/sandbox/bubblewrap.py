"""The command line of bubblewrap, where a system has it.

bubblewrap (https://github.com/containers/bubblewrap) starts a program in namespaces of its own: a
root folder that holds only what is named here, its own process ids, no network, no shared memory,
another host name. It needs user namespaces or root. `child.py` runs in it and gives up the rest.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import cache


@cache
def find_bubblewrap() -> str | None:
    """Return the path of bubblewrap; None where there is none."""
    return shutil.which("bwrap") if sys.platform == "linux" else None


def bubblewrap_command(
    bubblewrap: str, *, folder: str, disk_bytes: int, readable: Sequence[str]
) -> list[str]:
    """Return the words that start a command in bubblewrap.

    folder: where the command starts, an empty folder in memory.
    disk_bytes: size of that folder.
    readable: files and folders of the system that the command can read; those that do not exist are
        left out.
    """
    namespaces = [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
    # Devices are bound one by one: bubblewrap's own /dev is a folder of unlimited size.
    binds = [
        word
        for path in readable
        for word in ("--dev-bind-try" if path.startswith("/dev/") else "--ro-bind-try", path, path)
    ]
    return [
        bubblewrap,
        "--die-with-parent",
        *namespaces,
        # With this right `child.py` mounts a folder over it that limits the number of files too.
        *("--cap-add", "CAP_SYS_ADMIN"),
        *binds,
        *("--perms", "0777", "--size", str(disk_bytes), "--tmpfs", folder),
        *("--remount-ro", "/"),
        *("--chdir", folder),
        "--",
    ]
