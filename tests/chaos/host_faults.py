"""Faults of `vcpo run` and of the ranks of its learner: a run of its own, on one machine.

The run begins when the first of these faults is due. Its witnesses are those of the other run;
only the weights are not compared, since each rank publishes its own rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from tests.chaos.fault import Injected, NotInjectedError
from tests.chaos.host import FOLDER_VARIABLE
from tests.chaos.kinds import Kind
from tests.chaos.live_run import MARK_VARIABLE, SIGN_S, SPEC, holds, last_lines, marked_processes
from tests.chaos.pace import LONGEST_S, Pace, Silence, gaps
from tests.chaos.recorder import Line, read_lines
from vcpo.service.lifecycle import Ready, read_ready

_NUM_RANKS: Final = 2
_END_S: Final = 120.0
"""Time in which nothing of a host that was killed or terminated may be left."""
_POLL_S: Final = 0.1
_INTERRUPTED: Final = 130
"""Exit status of a host that was asked to stop."""
_PIDFD_GETFD: Final = 438
"""Number of the system call, the same on all architectures."""
_LEAST_BYTES: Final = 4096
"""Of address space: less than any process has, so it gets no more."""
_NO_MEMORY: Final = rb"MemoryError|[Cc]annot allocate memory|can't allocate memory|bad_alloc"
HOST_SPEC: Final = SPEC.replace(
    "learner: {threads: 1}", f"learner: {{threads: 1, processes: {_NUM_RANKS}}}"
).replace("minReplicas: 2, maxReplicas: 2", "minReplicas: 1, maxReplicas: 1")


@dataclass(slots=True)
class LiveHost:
    """A local run whose learner has two ranks; it is started again with --resume."""

    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    num_starts: int = 0
    pace: Pace = field(default_factory=Pace)
    _furthest: int = -1

    async def __aenter__(self) -> Self:
        for name in ("witness", "orders", "payloads", "clocks"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "run.yaml").write_text(HOST_SPEC)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pid in marked_processes(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.num_starts:
            self.process.wait()

    def start(self) -> None:
        """Start `vcpo run`, or resume what another one left."""
        options = [f"--run-dir={self.folder / 'run'}", *(["--resume"] if self.num_starts else [])]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            MARK_VARIABLE: str(self.folder),
            FOLDER_VARIABLE: str(self.folder),
        }
        command = [sys.executable, "-m", "tests.chaos.host", "run", str(self.folder / "run.yaml")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        self.num_starts += 1

    @property
    def log(self) -> Path:
        """What all hosts printed."""
        return self.folder / "host.log"

    async def working(self) -> None:
        """Wait until the run works; start it if nobody has.

        Raises:
            NotInjectedError: if it does not work.
        """
        if not self.num_starts:
            self.start()
        if not await self.progress():
            raise NotInjectedError("the local run does not work")

    def lives(self) -> list[Path]:
        """Witnesses of every rank 0 so far, in order."""
        return sorted((self.folder / "witness").glob("*-learner.jsonl"))

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that live, by rank."""
        found = {}
        for pid in self.processes(b"tests.chaos.learner"):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next((each[5:] for each in variables if each.startswith(b"RANK=")), None)
                if rank is not None:
                    found[int(rank)] = pid
        return found

    def serving(self) -> list[int]:
        """Ids of the ranks and workers that serve."""
        files = (self.folder / "run" / "processes").glob("*.json")
        ready = [each for path in files if (each := _ready(path)) is not None]
        return sorted({each.pid for each in ready} & set(marked_processes(self.folder)))

    def processes(self, module: bytes) -> list[int]:
        """Ids of the run's processes that run a module."""
        found = []
        for pid in marked_processes(self.folder):
            with contextlib.suppress(OSError):
                if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def newest_version(self) -> int:
        """As of `LiveRun`."""
        for life in reversed(self.lives()):
            for line in last_lines(life):
                if line["what"] == "trained":
                    return int(line["version"])
        return -1

    async def progress(self) -> bool:
        """As of `LiveRun`."""
        if not self.num_starts:
            return True
        self._furthest = before = max(self._furthest, self.newest_version())
        begun_s = time.monotonic()
        silence = Silence(pace=self.pace, since_s=begun_s, last=self._sign_of_life())
        while (newest := self.newest_version()) <= before and self.process.poll() is None:
            silence.hear(self._sign_of_life(), time.monotonic())
            if silence.is_hang(time.monotonic(), is_starting=True):
                return False
            await asyncio.sleep(_POLL_S)
        silence.hear(newest, time.monotonic())
        if not self.pace.starts_s:
            self.pace.starts_s.append(time.monotonic() - begun_s)
        self._measure_steps()
        for payload in (self.folder / "payloads").glob("*.safetensors"):
            payload.unlink(missing_ok=True)  # nobody compares them
        return newest > before

    def _sign_of_life(self) -> Hashable:
        return len(list((self.folder / "witness").iterdir())), self.newest_version()

    def _measure_steps(self) -> None:
        life = self.lives()[-1]
        moments = [
            line["monotonic_s"] for line in reversed(last_lines(life)) if line["what"] == "trained"
        ]
        self.pace.steps_s += gaps(moments)

    def mark(self) -> int:
        """How long the log is."""
        return self.log.stat().st_size

    async def told(self, since: int, pattern: str) -> bool:
        """Wait until the host prints something that matches; False: it does not in time."""

        def is_told() -> bool:
            text = self.log.read_bytes()[since:].decode(errors="replace")
            return re.search(pattern, " ".join(text.split())) is not None

        return await holds(is_told, SIGN_S)

    async def ends(self) -> bool:
        """Wait until no process of the run is left; False: some are, after a time."""
        await holds(lambda: self.process.poll() is not None, _END_S)
        return await holds(lambda: not marked_processes(self.folder), _END_S)

    async def drain(self) -> int | None:
        """End the run in order; return the host's exit status, None if it does not end."""
        if not self.num_starts:
            return _INTERRUPTED
        self.process.send_signal(signal.SIGTERM)
        await holds(lambda: self.process.poll() is not None, LONGEST_S)
        return self.process.poll()

    def leftovers(self) -> list[str]:
        """Processes that an ended run has left."""
        return [f"process {pid} of the local run" for pid in marked_processes(self.folder)]

    def lines(self) -> tuple[list[list[Line]], list[list[Line]]]:
        """What the witnesses of all ranks 0 and of all workers said, but for the weights."""
        workers = sorted((self.folder / "witness").glob("*-main-*.jsonl"))
        of_workers = [[one for one in read_lines(each) if one["what"] != "swapped"]
                      for each in workers]  # fmt: skip
        return [read_lines(each) for each in self.lives()], of_workers


Inject = Callable[[LiveHost, random.Random], Awaitable[Injected]]


async def kill_host(host: LiveHost, draw: random.Random) -> Injected:
    """`vcpo run` dies at any moment; nothing outlives it, and another one resumes."""
    await host.working()
    await asyncio.sleep(draw.uniform(0.0, 2.0))
    host.process.kill()
    is_gone = await host.ends()
    host.start()
    return Injected(what="host killed", sign="no process outlives it", is_shown=is_gone)


async def kill_host_over_stopped(host: LiveHost, draw: random.Random) -> Injected:
    """`vcpo run` dies while some of its processes stand still; they end too."""
    await host.working()
    if not (children := host.serving()):
        raise NotInjectedError("no process serves")
    stopped = draw.sample(children, draw.randint(1, len(children)))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    host.process.kill()
    is_gone = await host.ends()
    for pid in marked_processes(host.folder):  # or another host would wait for them
        os.kill(pid, signal.SIGKILL)
    host.start()
    what = f"host killed, {len(stopped)} of its processes stopped"
    return Injected(what=what, sign="no process outlives it", is_shown=is_gone)


async def terminate_host(host: LiveHost, draw: random.Random) -> Injected:
    """Somebody stops `vcpo run` in order; it saves, and another one resumes."""
    await host.working()
    await asyncio.sleep(draw.uniform(0.0, 2.0))
    host.process.terminate()
    is_gone = await host.ends()
    status = host.process.poll()
    host.start()
    sign = f"it ends with status {_INTERRUPTED}, and no process outlives it"
    is_shown = is_gone and status == _INTERRUPTED
    return Injected(what=f"host terminated, status {status}", sign=sign, is_shown=is_shown)


async def stop_host(host: LiveHost, draw: random.Random) -> Injected:
    """`vcpo run` stands still for a while; training goes on."""
    await host.working()
    duration_s = draw.uniform(1.0, 8.0)
    host.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(duration_s)
    host.process.send_signal(signal.SIGCONT)
    return Injected(what=f"host stopped for {duration_s:.1f} s")


async def kill_rank(host: LiveHost, draw: random.Random) -> Injected:
    """One of the ranks dies; all start again."""
    await host.working()
    since, (rank, pid) = host.mark(), draw.choice(await _all_ranks(host))
    os.kill(pid, signal.SIGKILL)
    sign = "the event LearnerRestarted"
    is_shown = await host.told(since, r"LearnerRestarted")
    return Injected(what=f"rank {rank} killed", sign=sign, is_shown=is_shown)


async def stop_rank(host: LiveHost, draw: random.Random) -> Injected:
    """One of the ranks stands still for a while; the others wait for it."""
    await host.working()
    (rank, pid), duration_s = draw.choice(await _all_ranks(host)), draw.uniform(1.0, 8.0)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(duration_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return Injected(what=f"rank {rank} stopped for {duration_s:.1f} s")


async def cut_ranks(host: LiveHost, _: random.Random) -> Injected:
    """Every connection between the ranks ends; all start again."""
    await host.working()
    since, (first, second) = host.mark(), [pid for _, pid in await _all_ranks(host)]
    if not (number := _cut_connections(first, second)):
        raise NotInjectedError("the ranks are not connected")
    sign = "the event LearnerRestarted"
    is_shown = await host.told(since, r"LearnerRestarted")
    return Injected(what=f"{number} connections of ranks cut", sign=sign, is_shown=is_shown)


def take_memory(*, of_learner: bool) -> Inject:
    """A process gets no more memory from the kernel for a while: it ends, goes on, or hangs.

    One that hangs is the host's to find: a Python that cannot start a thread waits for it for ever.
    """

    async def inject(host: LiveHost, draw: random.Random) -> Injected:
        await host.working()
        if of_learner:
            rank, pid = draw.choice(await _all_ranks(host))
            name = f"rank {rank}"
        else:
            name, pid = "worker", draw.choice(await _workers(host))
        logs = host.folder / "run" / "logs"
        since = {path: path.stat().st_size for path in logs.iterdir()}
        limits = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (_LEAST_BYTES, limits[1]))
        has_ended = await holds(lambda: not _is_alive(pid), draw.uniform(5.0, 15.0))
        if not has_ended:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, limits)
        texts = [path.read_bytes()[since.get(path, 0) :] for path in logs.iterdir()]
        if not has_ended and not any(re.search(_NO_MEMORY, text) for text in texts):
            raise NotInjectedError(f"{name} needed no more memory")
        return Injected(what=f"{name} without memory{', ended' if has_ended else ''}")

    return inject


async def _workers(host: LiveHost) -> list[int]:
    """Process ids of the workers.

    Raises:
        NotInjectedError: if there is none.
    """

    def found() -> list[int]:
        return host.processes(b"tests.chaos.worker")

    if not await holds(lambda: bool(found()), SIGN_S):
        raise NotInjectedError("no worker is there")
    return found()


def _ready(path: Path) -> Ready | None:
    """What a ready file says; None for another file, or none."""
    with contextlib.suppress(TypeError, ValueError):
        return read_ready(path)
    return None


def _is_alive(pid: int) -> bool:
    """Whether a process has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def _all_ranks(host: LiveHost) -> list[tuple[int, int]]:
    """Rank and process id of each rank.

    Raises:
        NotInjectedError: if they are not all there.
    """
    if not await holds(lambda: len(host.ranks()) == _NUM_RANKS, SIGN_S):
        raise NotInjectedError("not all ranks are there")
    return sorted(host.ranks().items())


def _cut_connections(first: int, second: int) -> int:
    """End the TCP connections between two processes, from outside; return how many there were."""
    ends, own = _connections(first), _connections(second)
    between = [number for number, (near, far) in own.items() if (far, near) in ends.values()]
    pidfd, number = os.pidfd_open(second), 0
    try:
        for descriptor in between:
            copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
            if copy < 0:
                raise NotInjectedError(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=copy) as shared, contextlib.suppress(OSError):
                shared.shutdown(socket.SHUT_RDWR)
                number += 1
    finally:
        os.close(pidfd)
    return number


def _connections(pid: int) -> dict[int, tuple[str, str]]:
    """Both ends of each TCP connection of a process, by its descriptor."""
    of_inode = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01":  # established
                near, far = (f"{each[-13:-5]}:{each[-4:]}" for each in fields[1:3])
                of_inode[f"socket:[{fields[9]}]"] = near, far
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := str(path.readlink())) in of_inode:
                found[int(path.name)] = of_inode[target]
    return found


INJECTORS: Final[Mapping[Kind, Inject]] = {
    Kind.HOST_KILLED: kill_host,
    Kind.HOST_KILLED_OVER_STOPPED: kill_host_over_stopped,
    Kind.HOST_TERMINATED: terminate_host,
    Kind.HOST_STOPPED: stop_host,
    Kind.RANK_KILLED: kill_rank,
    Kind.RANK_STOPPED: stop_rank,
    Kind.RANKS_CUT: cut_ranks,
    Kind.WORKER_WITHOUT_MEMORY: take_memory(of_learner=False),
    Kind.LEARNER_WITHOUT_MEMORY: take_memory(of_learner=True),
}
