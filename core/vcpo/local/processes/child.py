"""Child processes of the host: start, stop, exit and log.

The standard input of every child is the reading end of a pipe. When the host ends, for whatever
reason, the pipe ends and the child exits (`vcpo.service.lifecycle.on_parent_exit`). A child that is
stopped then continues (`wake_at_parent_exit`), so no orphan stays.

The ranks of a learner train together and find each other by the variables that torchrun sets
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables). None of them can
continue without the others, so they are started, stopped and restarted as one group.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vcpo.control.run_limits import is_hung
from vcpo.local.processes.forks import ForkedProcess
from vcpo.service.lifecycle import CANNOT_START, RANK_LOST, Ready, describe_exit, read_ready
from vcpo.service.logs import END_VARIABLE
from vcpo.wire.client import open_channel

_POLL_S = 0.05
_KILL_GRACE_S = 15.0
"""Time for the kernel to free the memory of a killed process, device memory included."""


@dataclass(slots=True, kw_only=True)
class ChildProcess:
    """A child process of this host."""

    name: str
    process: subprocess.Popen[bytes] | ForkedProcess
    log: Path
    """Log file; processes of the same name append to the same file."""
    ready_file: Path
    end_file: Path
    """Has why the process ended, if it said so."""
    hung_s: float = 0.0
    """Seconds without an answer when it was killed as hung; 0 if it was not."""

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def ready(self) -> Ready | None:
        return read_ready(self.ready_file)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def kill_hung(self, silent_s: float) -> None:
        self.hung_s = silent_s
        self.kill()

    def close_stdin(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def describe_failure(self) -> str:
        assert self.exit_code is not None
        if self.hung_s:
            return f"did not answer for {self.hung_s:.0f} s and was killed (log: {self.log})"
        cause = self._cause() if self.exit_code != -signal.SIGKILL else ""
        if self.exit_code == CANNOT_START and cause:
            return f"{'cannot start' if self.ready is None else 'gave up'}: {cause}"
        cause = cause and f": {' '.join(cause.split())}"
        return f"{describe_exit(self.exit_code)}{cause} (log: {self.log})"

    def _cause(self) -> str:
        """Return why it ended as it said; else its log's last line, unless that is information."""
        with contextlib.suppress(OSError):
            return self.end_file.read_text(encoding="utf-8").strip()
        with contextlib.suppress(OSError):
            last = self.log.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")[-1]
            return "" if " INFO " in last else last
        return ""

    def _send(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, number)


def start_child(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    ready_file: Path,
    environment: Mapping[str, str],
    fork: ForkedProcess | None = None,
) -> ChildProcess:
    """Start a child, or have a fork be it, in its own session: Ctrl-C reaches only the host."""
    end_file = ready_file.with_suffix(".end")
    for stale in (ready_file, end_file):
        stale.unlink(missing_ok=True)
    own = {**os.environ, **environment, END_VARIABLE: str(end_file)}
    if fork is not None:
        fork.order(command, own, log)
    with log.open("ab") as output:
        process = fork or subprocess.Popen(  # noqa: S603 - our own modules, by our own interpreter
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=own,
            start_new_session=True,
        )
    return ChildProcess(
        name=name, process=process, log=log, ready_file=ready_file, end_file=end_file
    )


async def wait_for_exit(children: Iterable[ChildProcess], timeout_s: float) -> list[ChildProcess]:
    """Wait up to `timeout_s` seconds until all children have ended; return those still running."""
    deadline_s = time.monotonic() + timeout_s
    running = [child for child in children if child.exit_code is None]
    while running and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
        running = [child for child in running if child.exit_code is None]
    return running


async def stop_children(children: Iterable[ChildProcess], grace_s: float) -> None:
    """Terminate all children; kill those that still run after `grace_s` seconds."""
    everyone = list(children)
    for child in everyone:
        child.terminate()
    for child in await wait_for_exit(everyone, grace_s):
        child.kill()
    await wait_for_exit(everyone, _KILL_GRACE_S)
    for child in everyone:
        child.close_stdin()


_UNANSWERED = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}


async def answers_health_check(child: ChildProcess, timeout_s: float) -> bool:
    """Return whether a process answers a health check, with any status; False before it serves."""
    ready = child.ready
    if ready is None:
        return False
    address = f"127.0.0.1:{ready.grpc_port}"
    async with open_channel(address, key=None) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _UNANSWERED
    return True


class Liveness:
    """Time since which each process has not answered health checks.

    The time counts from the first unanswered check. A host that was suspended itself, or checks
    rarely, therefore does not treat a process as hung.
    """

    def __init__(
        self, *, startup_deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._startup_deadline_s = startup_deadline_s
        self._clock = clock
        self._unanswered_since_s: dict[tuple[int, bool], float] = {}
        """Time of the first unanswered check, by process id and whether the process serves."""

    def record(self, child: ChildProcess, *, answered: bool) -> None:
        if answered:
            self._unanswered_since_s.pop(_key(child), None)
        else:
            self._unanswered_since_s.setdefault(_key(child), self._clock())

    def silent_s(self, child: ChildProcess) -> float:
        now_s = self._clock()
        return now_s - self._unanswered_since_s.get(_key(child), now_s)

    def is_hung(self, child: ChildProcess) -> bool:
        return is_hung(
            silent_s=self.silent_s(child),
            has_started=child.ready is not None,
            startup_deadline_s=self._startup_deadline_s,
        )

    def retain(self, children: Iterable[ChildProcess]) -> None:
        kept = {child.process.pid for child in children}
        self._unanswered_since_s = {
            key: since_s for key, since_s in self._unanswered_since_s.items() if key[0] in kept
        }


def _key(child: ChildProcess) -> tuple[int, bool]:
    return child.process.pid, child.ready is not None


_LOOPBACK = "127.0.0.1"


def rank_name(rank: int) -> str:
    """Return the name of a rank's process, log and ready file: `learner`, `learner-1`, ..."""
    return "learner" if rank == 0 else f"learner-{rank}"


def rank_variables(rank: int, *, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank; none if it is the only one.

    port: where rank 0 waits for the others, on the loopback address.
    """
    if num_ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        port: int = listener.getsockname()[1]
    return port


def first_failure(ranks: Sequence[ChildProcess]) -> int | None:
    """Return the rank that failed, of those that have ended; None if none failed.

    One failure ends all ranks within moments. The cause is the rank that hung; else the one that a
    signal killed; else the one that does not say that it lost another.
    """
    failed = [rank for rank, child in enumerate(ranks) if child.exit_code]
    return min(failed, key=lambda rank: (_suspicion(ranks[rank]), rank), default=None)


def _suspicion(child: ChildProcess) -> int:
    """Return how surely an ended process is not the cause: 0 is the cause."""
    assert child.exit_code is not None
    if child.hung_s:
        return 0
    if child.exit_code == -signal.SIGABRT:  # the communication library aborts where a rank is lost
        return 2
    if child.exit_code < 0:
        return 1
    return 3 if child.exit_code == RANK_LOST else 2
