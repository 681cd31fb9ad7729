"""`make chaos`: real processes under random faults; the last line is JSON.

The harness runs in a process that may mount disks of its own, so that it can fill them, where the
system allows that.
"""

import contextlib
import os
import subprocess
import sys

OWN_MOUNTS_VARIABLE = "CHAOS_OWN_MOUNTS"
"""Set in a process that may mount disks of its own."""


def main() -> int:
    """Run the harness with these arguments; return its exit status."""
    harness = [sys.executable, "-m", "tests.chaos.harness", *sys.argv[1:]]
    unshare = _unshare()
    own = {OWN_MOUNTS_VARIABLE: "1"} if unshare else {}
    return subprocess.run([*unshare, *harness], check=False, env={**os.environ, **own}).returncode


def _unshare() -> list[str]:
    """The command that runs another with mounts of its own; empty where there is none."""
    for options in ([], ["--user", "--map-root-user"]):
        command = ["unshare", "--mount", *options]
        trial = [*command, "mount", "-t", "tmpfs", "none", "/mnt"]
        with contextlib.suppress(OSError):
            if subprocess.run(trial, check=False, capture_output=True).returncode == 0:
                return command
    return []


if __name__ == "__main__":
    raise SystemExit(main())
