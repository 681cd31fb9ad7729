"""Memory of this process."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import Final

_PEAK: Final = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had resident so far, in bytes.

    Pages that it shares with other processes count. On Linux the kernel's own maximum is read,
    because that of `getrusage` begins with what the parent process had.
    Source: https://man7.org/linux/man-pages/man5/proc_pid_status.5.html
    """
    if sys.platform == "linux":
        found = _PEAK.search(Path("/proc/self/status").read_text())
        if found is not None:
            return int(found[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
