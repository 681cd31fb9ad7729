"""A run at work: learner and workers as real processes over TLS, with a proxy between them.

The harness is the host: it starts each process as a local run does, and starts it again when it
ends. It reads witnesses and logs, never the run's own records.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.chaos.answers import Damage, End, Part
from tests.chaos.drops import Terms
from tests.chaos.pace import Pace, Silence, gaps
from tests.chaos.proxy import TcpProxy
from tests.chaos.recorder import Line, read_lines
from tests.chaos.wall_clock import CLOCK_VARIABLE, WallClock
from tests.chaos.witness import ORDER_VARIABLE, PAYLOADS_VARIABLE, WITNESS_VARIABLE
from tests.fixtures.certificates import RunCertificates
from vcpo.local.processes.child import free_port
from vcpo.service.lifecycle import CANNOT_START, DRAINED, SERVICE_ENVIRONMENT, Ready, read_ready
from vcpo.wire.access.roles import LEARNER_ROLES, WORKER_ROLES, key_variables, new_run_keys

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/tiny"
MARK_VARIABLE = "CHAOS_RUN"
"""Names the harness's folder in the environment of each process that it starts."""
NUM_WORKERS = 2
SIGN_S = 240.0
"""Time in which a fault must show."""
_POLL_S = 0.1
_RESTART_S = 0.3
_END_S = 120.0
_HOPELESS = 5
"""Learners in a row that say that they cannot start, after which no other will."""
_LINES_BYTES = 32_768
TERMS = Terms(max_policy_lag_steps=4, prompts_per_step=8, group_size=4, lease_timeout_s=10.0)
"""What the spec says of drops."""

SPEC = f"""
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {{name: chaos}}
spec:
  model: {{name: {MODEL}}}
  environment:
    name: tests.chaos.worker:ScatteredReward
    parameters: {{digits: 5, style: plain}}
  steps: 1000000
  sampling: {{maxNewTokens: 8}}
  batch: {{promptsPerStep: {TERMS.prompts_per_step}, trajectoriesPerPrompt: {TERMS.group_size}}}
  algorithm: {{maxPolicyLagSteps: {TERMS.max_policy_lag_steps}}}
  optimizer: {{learningRate: 3e-4}}
  evaluation: {{everySteps: 100, prompts: 16}}
  checkpoint: {{everySteps: 10}}
  lease: {{timeoutSeconds: {TERMS.lease_timeout_s:g}}}
  learner: {{threads: 1}}
  tracking: {{sinks: [{{name: tensorboard}}]}}
  rollouts:
    - {{name: main, minReplicas: 2, maxReplicas: 2, maxConcurrentSequences: 16, threads: 1}}
"""


@dataclass(slots=True, kw_only=True, eq=False)
class Service:
    """One process of the run."""

    name: str
    process: subprocess.Popen[bytes]
    witness: Path
    order: Path
    ready_file: Path
    part: Part
    clock: WallClock
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ready(self) -> Ready | None:
        return read_ready(self.ready_file)

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            self.process.send_signal(number)

    async def ended(self, timeout_s: float) -> int | None:
        await holds(lambda: not self.is_alive, timeout_s)
        return self.process.poll()


@dataclass(slots=True)
class LiveRun:
    """The processes of one run, and the folders in which they work.

    folder: of logs, witnesses and keys. run_dir: of the run, on the disk that faults fill.
    """

    folder: Path
    run_dir: Path
    keys: Mapping = field(default_factory=new_run_keys)
    port: int = field(default_factory=free_port)
    """Where the learner listens."""
    lives: list[Service] = field(default_factory=list)
    """Every learner so far."""
    workers: list[Service] = field(default_factory=list)
    """Every worker so far."""
    damages: list[Damage] = field(default_factory=list)
    """Of the redo log."""
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while a fault needs the learner to stay away."""
    proxy: TcpProxy = field(init=False)
    certificates: RunCertificates = field(init=False)
    ends: list[End] = field(default_factory=list)
    """Processes that ended before the run was told to."""
    pace: Pace = field(default_factory=Pace)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _supervision: asyncio.Task[None] | None = None
    _furthest: int = -1
    _serving: set[str] = field(default_factory=set)
    """Names of processes whose start was measured."""
    _measured: tuple[str, int] = ("", -1)
    """Life and version up to which steps were measured."""

    async def __aenter__(self) -> Self:
        for name in ("logs", "witness", "orders", "ready", "payloads", "clocks"):
            (self.folder / name).mkdir()
        self.run_dir.mkdir(exist_ok=True)
        for path in (self.folder / "run.yaml", self.run_dir / "spec.yaml"):
            path.write_text(SPEC)
        self.certificates = RunCertificates(self.folder / "tls")
        self.proxy = TcpProxy(self.port)
        await self.proxy.__aenter__()
        self.may_start.set()
        self._supervision = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_supervision()
        for service in self.services:
            service.send(signal.SIGKILL)
            service.process.wait()
        await self.proxy.__aexit__()

    @property
    def learner(self) -> Service:
        return self.lives[-1]

    @property
    def services(self) -> list[Service]:
        return [each for each in (*self.lives, *self.workers) if each.is_alive]

    @property
    def living_workers(self) -> list[Service]:
        return [each for each in self.workers if each.is_alive]

    @property
    def payloads(self) -> Path:
        return self.folder / "payloads"

    def newest_version(self) -> int:
        """Version before the last step that the newest learner took; -1 before its first."""
        if not self.lives:
            return -1
        lines = last_lines(self.learner.witness)
        return next((line["version"] for line in lines if line["what"] == "trained"), -1)

    async def progress(self) -> bool:
        """Wait for a step that no life took before; return False if it hangs instead."""
        self._furthest = before = max(self._furthest, self.newest_version())
        silence = Silence(pace=self.pace, since_s=self.clock(), last=self._sign_of_life())
        while (newest := self.newest_version()) <= before and not self.has_given_up:
            now_s = self.clock()
            silence.hear(self._sign_of_life(), now_s)
            is_starting = any(each.ready is None for each in self.services)
            if silence.is_hang(now_s, is_starting=is_starting):
                return False
            await self.sleep(_POLL_S)
        silence.hear(newest, self.clock())
        self._measure_steps()
        self._notice_ends()
        return newest > before

    async def works(self, timeout_s: float) -> bool:
        """Wait until a worker does something, so that it has calls under way."""

        def said() -> int:
            files = [each.witness for each in self.living_workers]
            return sum(path.stat().st_size for path in files if path.exists())

        before = said()
        return await holds(lambda: said() > before, timeout_s)

    def _sign_of_life(self) -> Hashable:
        serving = [each.name for each in self.services if each.ready is not None]
        return len(self.lives), len(self.workers), tuple(serving), self.newest_version()

    def _measure_steps(self) -> None:
        """Take in what the newest steps took."""
        taken = [
            (line["version"], line["monotonic_s"])
            for line in reversed(last_lines(self.learner.witness))
            if line["what"] == "trained"
        ]
        life, version = self._measured
        if life == self.learner.name:
            taken = [each for each in taken if each[0] >= version]
        self.pace.steps_s += gaps([at_s for _, at_s in taken])
        if taken:
            self._measured = self.learner.name, taken[-1][0]

    def _notice_ends(self) -> None:
        """Note which processes have ended."""
        known = {end.name for end in self.ends}
        for each in (*self.lives, *self.workers):
            if each.name not in known and (status := each.process.poll()) is not None:
                end = End(name=each.name, part=each.part, status=status, at_s=time.monotonic())
                self.ends.append(end)

    def _measure_starts(self) -> None:
        """Take in what processes took to serve."""
        for each in self.services:
            if each.name not in self._serving and each.ready is not None:
                self._serving.add(each.name)
                self.pace.starts_s.append(time.monotonic() - each.started_s)

    @property
    def has_given_up(self) -> bool:
        last = [each.process.poll() for each in self.lives[-_HOPELESS:]]
        return last == [CANNOT_START] * _HOPELESS

    def mark(self) -> Mapping[Path, int]:
        return {path: path.stat().st_size for path in (self.folder / "logs").iterdir()}

    def is_told(self, since: Mapping[Path, int], pattern: str) -> bool:
        return bool(self.found(since, pattern))

    def found(self, since: Mapping[Path, int], pattern: str) -> list[str]:
        """What processes have logged since a mark that matches: the pattern's group, if it has
        one."""
        found: list[str] = []
        for path in (self.folder / "logs").iterdir():
            with path.open("rb") as log:
                log.seek(since.get(path, 0))
                found += re.findall(pattern, log.read().decode(errors="replace"))
        return found

    def has_resumed(self, life: int) -> bool:
        return any(line["what"] == "resumed" for line in read_lines(self.lives[life].witness))

    async def told(self, since: Mapping[Path, int], pattern: str) -> bool:
        return await holds(lambda: self.is_told(since, pattern), SIGN_S)

    @contextlib.contextmanager
    def without_learner(self) -> Iterator[None]:
        """Start no learner until the end of the block."""
        self.may_start.clear()
        try:
            yield
        finally:
            self.may_start.set()

    async def drain(self) -> int | None:
        """End the run in order; return the learner's exit status, None if it does not end."""
        await self._stop_supervision()
        self.learner.send(signal.SIGCONT)
        self.learner.send(signal.SIGTERM)
        status = await self.learner.ended(_END_S)
        for worker in self.living_workers:
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGTERM)
        for worker in self.workers:
            await worker.ended(_END_S)
        return status

    def leftovers(self) -> list[str]:
        """What an ended run has left: processes, ports, locks, half-written files."""
        left = [f"process {pid}" for pid in marked_processes(self.folder)]
        for service in (*self.lives[-1:], *self.workers[-NUM_WORKERS:]):
            ready = service.ready
            if ready is not None and _is_open(ready.grpc_port):
                left.append(f"port {ready.grpc_port} of {service.name}")
        left += [f"lock {path.name}" for path in self.run_dir.glob("*.lock") if _is_locked(path)]
        left += [str(path) for path in self.run_dir.rglob("*.partial")]
        return left + [str(path) for path in Path("/dev/shm").glob(f"*{self.folder.name}*")]

    def lines(self) -> tuple[list[list[Line]], list[list[Line]]]:
        learners = [read_lines(each.witness) for each in self.lives]
        return learners, [read_lines(each.witness) for each in self.workers]

    async def _supervise(self) -> None:
        """Start what does not run, again and again."""
        while True:
            if self.may_start.is_set() and not any(each.is_alive for each in self.lives):
                self._start_learner()
            if self.lives and self.learner.ready is not None:
                while len(self.living_workers) < NUM_WORKERS:
                    self._start_worker()
            self._measure_starts()
            self._notice_ends()
            await asyncio.sleep(_RESTART_S)

    async def _stop_supervision(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)

    def _start_learner(self) -> None:
        name = f"learner-{len(self.lives):03d}"
        options = [f"--run-dir={self.run_dir}", f"--listen=127.0.0.1:{self.port}"]
        options += ["--drain-seconds=5", "--linger-seconds=1", f"--drained-status={DRAINED}"]
        options += ["--resume"] if self.lives else []
        keys = key_variables(self.keys, LEARNER_ROLES)
        self.lives.append(self._start(name, Part.LEARNER, options, keys))

    def _start_worker(self) -> None:
        name = f"main-{len(self.workers):03d}"
        options = [f"--learner=localhost:{self.proxy.port}", "--group=main", f"--worker-id={name}"]
        options += ["--listen=127.0.0.1:0", "--drain-seconds=2"]
        keys = key_variables(self.keys, WORKER_ROLES)
        self.workers.append(self._start(name, Part.WORKER, options, keys))

    def _start(self, name: str, part: Part, options: list[str], keys: Mapping[str, str]) -> Service:
        ready_file = self.folder / "ready" / f"{name}.json"
        witness, order = self.folder / "witness" / f"{name}.jsonl", self.folder / "orders" / name
        clock_file = self.folder / "clocks" / name
        clock = WallClock(clock_file)
        environment = {
            **os.environ,
            **SERVICE_ENVIRONMENT,
            **keys,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            MARK_VARIABLE: str(self.folder),
            WITNESS_VARIABLE: str(witness),
            ORDER_VARIABLE: str(order),
            PAYLOADS_VARIABLE: str(self.payloads),
            CLOCK_VARIABLE: str(clock_file),
        }
        command = [
            sys.executable,
            "-m",
            f"tests.chaos.{part}",
            str(self.folder / "run.yaml"),
            *options,
        ]
        command += ["--metrics-listen=127.0.0.1:0", f"--tls={self.certificates.folder}"]
        command += [f"--ready-file={ready_file}", "--exit-with-parent"]
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        return Service(
            name=name,
            process=process,
            witness=witness,
            order=order,
            ready_file=ready_file,
            part=part,
            clock=clock,
        )


async def holds(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds; return False if it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def marked_processes(folder: Path) -> list[int]:
    """Ids of the living processes that a harness with this folder has started."""
    mark, found = f"{MARK_VARIABLE}={folder}\0".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes() + b"\0":
                found.append(int(environment.parent.name))
    return found


def last_lines(path: Path) -> list[Line]:
    """The newest whole lines of a witness, newest first."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LINES_BYTES))
        begins_whole = file.tell() == 0
        lines = file.read().split(b"\n")[:-1]
    return [json.loads(line) for line in reversed(lines if begins_whole else lines[1:])]


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0):
        return True
    return False


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
