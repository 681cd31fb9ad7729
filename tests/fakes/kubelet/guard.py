"""`python guard.py PARENT COMMAND...`: become COMMAND, and die when PARENT does.

The kernel sends SIGKILL to this process when the thread that started it ends, also after `exec`.
So no container outlives the fake kubelet, however the fake kubelet ends. This works on Linux only;
on other systems the fake kubelet stops its containers itself.
Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Ask for the signal, make sure that the parent is still there, and become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"exec: {command[0]!r}: {error.strerror}\n")
        raise SystemExit(128) from error


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
