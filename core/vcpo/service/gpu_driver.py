"""Whether the NVIDIA driver of a machine is new enough for the CUDA that is installed.

torch sees no GPU where it is not, and would compute on the CPU without a word.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from vcpo.service.lifecycle import StartError

_VERSION_FILE: Final = Path("/proc/driver/nvidia/version")
_LEAST_DRIVERS: Final = {12: 525, 13: 580}
"""First number of the oldest driver for each version of CUDA (NVIDIA's CUDA Compatibility)."""


def driver_version(file: Path = _VERSION_FILE) -> str | None:
    """Return the version of the kernel's NVIDIA driver, such as `580.95.05`; None without one."""
    try:
        found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", file.read_text())
    except OSError:
        return None
    return None if found is None else found.group(1)


def cuda_version() -> int | None:
    """Return the version of CUDA with which torch is built; None for a build for CPUs."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            return int(version(name).partition(".")[0])
        except PackageNotFoundError:
            continue
    return None


def driver_problem(driver: str | None, cuda: int | None) -> str | None:
    """Return why GPUs cannot be used with this driver, and the fix; None if they can."""
    least = _LEAST_DRIVERS.get(cuda or 0)
    if driver is None or least is None or int(driver.partition(".")[0]) >= least:
        return None
    return (
        f"the machine's NVIDIA driver is {driver}, and CUDA {cuda} needs {least} or newer; update"
        " the driver, or choose nodes that have one"
    )


def check_driver() -> None:
    """Check the driver before a process loads torch; where GPUs are hidden, nothing is checked."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    if problem := driver_problem(driver_version(), cuda_version()):
        raise StartError(problem)
