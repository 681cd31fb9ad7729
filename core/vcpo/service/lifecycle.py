"""Start and end of a service's process: ready file, start errors, signals, and the parent's exit.

A service that the local host starts writes a *ready file* with its ports as soon as it serves. If
it cannot start because of something that the user must fix, it exits with status `CANNOT_START`.
Why it ends it writes to a file of its host (`vcpo.service.logs.END_VARIABLE`). A service ends when
the host ends, for whatever reason: its standard input is the reading end of a pipe, and the kernel
closes the other end with the host. If it is stopped, the kernel continues it.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from vcpo.service.logs import report_end

GPU_MEMORY_VARIABLE = "VCPO_GPU_MEMORY_RATIO"
"""Environment variable with the share of a GPU's memory that a service may use, in (0, 1]."""

SERVICE_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warn at every fork
    # Progress bars would hide the messages in a log.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    # gRPC's C core writes lines of its own, in a form of its own, about peers that come and go.
    "GRPC_VERBOSITY": "NONE",
}
"""Environment variables of every service, on both hosts; the user may override them."""

CANNOT_START = 2
"""Exit status after a start error; a restart does not help."""

DRAINED = os.EX_TEMPFAIL
"""Exit status of a local run's learner that was stopped before the last step. In a cluster the
status is 0: a pod that stops on request has not failed."""

RANK_LOST = os.EX_UNAVAILABLE
"""Exit status of a rank of the learner that could not continue because another rank did not."""

SET_ASIDE = os.EX_NOPERM
"""Exit status of a worker that the learner took out of the run; a new process may do better."""

NOT_TRIED = os.EX_NOHOST
"""Exit status of the trial of an environment that needs a service which does not answer here, or
more time."""

TRIED: Final = "tried to the end\n"
"""The last line of a trial that found nothing wrong; user code may end its process with 0."""

_MAX_PORT = 65_535
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class StartError(Exception):
    """An error that the user must fix before a service can start."""


def add_service_options(parser: argparse.ArgumentParser, *, port: int, drain: str) -> None:
    """Add the options that learner and worker have in common.

    port: default of the gRPC server; /metrics has the next one.
    drain: what --drain-seconds gives time for.
    """
    where = "host:port of the {}; port 0: any free one (default: %(default)s)"
    servers = {"--listen": "gRPC server", "--metrics-listen": "/metrics server"}
    for number, (option, server) in enumerate(servers.items(), start=port):
        parser.add_argument(option, default=f"127.0.0.1:{number}", help=where.format(server))
    parser.add_argument(
        "--drain-seconds",
        dest="drain_s",
        type=float,
        default=10.0,
        help=f"seconds {drain} (default: %(default)s)",
    )
    parser.add_argument("--ready-file", type=Path, help="file to write when the service is ready")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="shut down when standard input ends"
    )


def gpu_memory_ratio() -> float | None:
    """Return the share of its GPU's memory that this process may use; None is no limit."""
    given = os.environ.get(GPU_MEMORY_VARIABLE)
    if given is None:
        return None
    with contextlib.suppress(ValueError):
        if 0.0 < float(given) <= 1.0:
            return float(given)
    raise ValueError(f"{GPU_MEMORY_VARIABLE}: must be a share in (0, 1], got {given!r}")


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """Convert errors of the enclosed code, which uses the user's files and settings."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from error


def report_start_error(error: StartError) -> int:
    """Report a start error as the cause of the end, and return the exit status."""
    report_end(str(error))
    return CANNOT_START


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Process id and ports of a service that serves."""

    pid: int
    grpc_port: int
    metrics_port: int


def write_ready(path: Path, ready: Ready) -> None:
    """Write the ready file atomically."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(ready)) + "\n")
    partial.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The command line that learner and worker have in common."""

    run_file: Path
    listen: str
    metrics_listen: str
    drain_s: float
    tls: Path | None
    """Folder of the certificates; None if there is none."""
    plain_text: bool
    """Whether plain text may leave this machine."""
    health_listen: str | None
    ready_file: Path | None
    exit_with_parent: bool

    def report_ready(self, *, grpc_port: int, metrics_port: int) -> None:
        """Write the ready file if the host asked for one."""
        if self.ready_file is not None:
            ready = Ready(pid=os.getpid(), grpc_port=grpc_port, metrics_port=metrics_port)
            write_ready(self.ready_file, ready)


def read_ready(path: Path) -> Ready | None:
    """Read a ready file; return None while it does not exist."""
    try:
        return Ready(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def on_stop_request(stop: Callable[[str], None]) -> None:
    """Call `stop` with a reason on SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)


def wake_at_parent_exit() -> None:
    """Have the kernel continue this process, if it is stopped, when its parent ends; on Linux only.

    A process that SIGSTOP has stopped reads no end of its input, and would outlive a killed parent.
    With SIGKILL in place of SIGCONT nothing would be saved. The signal comes when the thread that
    started this process ends, which may be long before the parent does: SIGCONT does no harm then.
    No check of the parent is needed: one that has ended by now has closed the input.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def keep_freed_memory() -> None:
    """Have the C library keep the memory that this process frees; with glibc only.

    Tensors on a CPU take as much again in the next step, and each page from the system is a fault.
    """
    with contextlib.suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        # Larger blocks go back: a hole of their size might never be filled.
        library.mallopt(_M_MMAP_THRESHOLD, 2**30)


def on_parent_exit(stop: Callable[[str], None]) -> None:
    """Call `stop` when standard input ends, that is when the parent process has ended."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def read_input() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop("the host process has ended")

    loop.add_reader(descriptor, read_input)


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` into host and port; the port is 0 (any free port) to 65535."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"address: must be host:port, got {address!r}")
    return host, int(port)


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


def describe_exit(exit_code: int) -> str:
    """Describe how a process ended; as in `subprocess`, a negative code is a signal's number."""
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ", as the system does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


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
    """Check the driver before a process loads torch; where GPUs are hidden, nothing is checked.

    torch sees no GPU where the driver is too old, and would compute on the CPU without a word.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    if problem := driver_problem(driver_version(), cuda_version()):
        raise StartError(problem)
