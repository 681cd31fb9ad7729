"""What this machine or pod lacks for a learner or a worker: each check ends within seconds."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from vcpo.local.models import date_of_hub
from vcpo.local.processes.gpus import find_gpus
from vcpo.service.gpu_driver import cuda_version, driver_problem, driver_version

_GIB: Final = 2**30
_LEAST_SHARED_GIB: Final = 1
_LEAST_DISK_GIB: Final = 10
_MOST_CLOCK_S: Final = 60.0
_TIMEOUT_S: Final = 5.0
_COMPILERS: Final = ("cc", "gcc", "clang")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    is_well: bool
    found: str
    cure: str = ""
    """What to do if it is not well."""


def findings() -> Iterator[Finding]:
    """Yield what each check found, as soon as it is known."""
    yield driver_finding(driver_version(), cuda_version())
    yield _gpus()
    yield compiler_finding(shutil.which, needs_one=driver_version() is not None)
    yield _room("shared memory", "/dev/shm", _LEAST_SHARED_GIB, "mount a volume in memory there")  # noqa: S108 - only measured
    yield _room("disk", tempfile.gettempdir(), _LEAST_DISK_GIB, "free some, or set TMPDIR")
    yield user_finding(getpass.getuser)
    yield _isolation()
    yield from hub_findings(date_of_hub, time.time())


def driver_finding(driver: str | None, cuda: int | None) -> Finding:
    """Judge the NVIDIA driver; a machine without one computes on its CPU."""
    problem = driver_problem(driver, cuda)
    found = f"{driver or 'none'}; CUDA {cuda or 'none'} is installed"
    return Finding(name="driver", is_well=problem is None, found=found, cure=problem or "")


def compiler_finding(which: Callable[[str], str | None], *, needs_one: bool) -> Finding:
    """Judge whether Triton and torch.compile find a C compiler; only GPUs need one."""
    path = next(filter(None, map(which, _COMPILERS)), None)
    return Finding(
        name="compiler",
        is_well=path is not None or not needs_one,
        found=path or "none",
        cure="install gcc and libc6-dev: Triton compiles its kernels' launchers when they start",
    )


def user_finding(name_of_user: Callable[[], str]) -> Finding:
    """Judge whether the user has a name, for which some libraries ask."""
    try:
        return Finding(name="user", is_well=True, found=name_of_user())
    except (KeyError, OSError):
        cure = "set the variable USER, or add the user to /etc/passwd"
        return Finding(
            name="user", is_well=False, found=f"{os.getuid()}, without a name", cure=cure
        )


def hub_findings(date_of_hub: Callable[[], str], now_s: float) -> Iterator[Finding]:
    """Judge the way to the Hugging Face hub, and by its date this machine's clock.

    date_of_hub: Returns the header `Date`. Raises OSError if there is no way.
    """
    try:
        date = date_of_hub()
    except OSError as error:
        cure = "open the way, or mount the models and set HF_HUB_OFFLINE to 1"
        yield Finding(name="hub", is_well=False, found=str(error), cure=cure)
        return
    yield Finding(name="hub", is_well=True, found="answers")
    off_s = now_s - parsedate_to_datetime(date).timestamp()
    yield Finding(
        name="clock",
        is_well=abs(off_s) <= _MOST_CLOCK_S,
        found=f"{off_s:+.0f} s from the hub's",
        cure="synchronize it: certificates and leases depend on it",
    )


def _gpus() -> Finding:
    gpus = find_gpus()
    memory = [f"{gpu.name} {(gpu.memory_mebibytes or 0) / 1024:.0f} GiB" for gpu in gpus]
    is_hidden = driver_version() is not None and not gpus
    cure = "ask for GPUs (`learner.gpusPerReplica`, `rollouts[].gpus`), or see CUDA_VISIBLE_DEVICES"
    return Finding(name="GPUs", is_well=not is_hidden, found=", ".join(memory) or "none", cure=cure)


def _room(name: str, folder: str, least_gib: int, cure: str) -> Finding:
    try:
        free = shutil.disk_usage(folder).free / _GIB
    except OSError as error:
        return Finding(name=name, is_well=False, found=str(error), cure=cure)
    is_well = free >= least_gib and os.access(folder, os.W_OK)
    found = f"{free:.1f} GiB free in {folder}"
    return Finding(
        name=name, is_well=is_well, found=found, cure=f"{cure}; {least_gib} GiB at least"
    )


def _isolation() -> Finding:
    """Judge whether programs of a model can be isolated; only the Python tool needs that."""
    bubblewrap = shutil.which("bwrap")
    cure = "install bubblewrap and allow user namespaces, or use no Python tool"
    if bubblewrap is None:
        return Finding(name="isolation", is_well=False, found="no bwrap", cure=cure)
    command = [bubblewrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603 - our own command
    found = tried.stderr.strip() or "works"
    return Finding(name="isolation", is_well=tried.returncode == 0, found=found, cure=cure)
