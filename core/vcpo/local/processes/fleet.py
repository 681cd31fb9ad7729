"""The fleet of a local run: one learner process and as many rollout workers as are wanted."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vcpo.control.supervision import MAX_WORKER_FAILURES, FailureStreak
from vcpo.local.processes.child import ChildProcess, start_child, stop_all, wait_for_exit
from vcpo.local.processes.gpus import Gpu, GpuShare, plan_gpus
from vcpo.local.run_dir import RunDir
from vcpo.service.lifecycle import CANNOT_START, DRAINED, SERVICE_ENVIRONMENT, TOKEN_VARIABLE
from vcpo.spec import VCPORun

_HEAVY_MODULES = ("torch", "transformers", "vcpo_learner", "vcpo_rollout")
_ANY_PORT = "127.0.0.1:0"


class RunFailedError(RuntimeError):
    """The run cannot go on: a process failed in a way that starting it again will not cure."""


def check_installed(modules: Sequence[str] = _HEAVY_MODULES) -> None:
    """Check that this environment can run learner and workers, or whatever else needs `modules`.

    Raises:
        RunFailedError: naming what is missing and how to get it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise RunFailedError(
            f"not installed here: {', '.join(missing)}. Cure: pip install 'vcpo[local]'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that ended unasked."""

    child: ChildProcess
    pause_s: float
    """How long its group waits before it starts another."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """The workers of a rollout group that are to run, and how those before them fared."""

    workers: list[ChildProcess]
    streak: FailureStreak
    num_productive: int = 0
    """Workers so far that delivered; each is progress of the group."""
    start_after_s: float = 0.0


class Fleet:
    """Starts and stops the processes of one local run."""

    def __init__(
        self,
        run: VCPORun,
        run_dir: RunDir,
        *,
        gpus: Sequence[Gpu] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        """Shared by this run's processes alone."""
        self.learner: ChildProcess | None = None
        self._run = run
        self._run_dir = run_dir
        self._clock = clock
        self._groups = {
            group.name: _Group(workers=[], streak=FailureStreak()) for group in run.spec.rollouts
        }
        self.gpu_plan = plan_gpus(
            gpus, max_workers=sum(group.max_replicas for group in run.spec.rollouts)
        )
        self._gpu_of: dict[str, str] = {}
        """By worker that was ever started, where there are GPUs."""
        self._leaving: list[ChildProcess] = []
        self._started = 0
        self._productive: set[str] = set()
        """Names of workers that delivered."""

    @property
    def workers(self) -> Mapping[str, Sequence[ChildProcess]]:
        """Workers that are to run, by rollout group."""
        return {name: group.workers for name, group in self._groups.items()}

    @property
    def children(self) -> list[ChildProcess]:
        """Every process of the run, those on their way out included."""
        workers = [child for group in self._groups.values() for child in group.workers]
        return [*([self.learner] if self.learner else []), *workers, *self._leaving]

    def start_learner(self, *, resume: bool, port: int = 0) -> ChildProcess:
        """Start the learner; `port` 0 takes a free one, a restart keeps the one before."""
        if self.learner is not None:
            self.learner.close_stdin()
        options = [f"--listen=127.0.0.1:{port}", f"--metrics-listen={_ANY_PORT}"]
        options += [f"--run-dir={self._run_dir.path}", f"--drained-status={DRAINED}"]
        options += ["--resume"] if resume else []
        self.learner = self._start(
            "learner",
            "vcpo_learner",
            options,
            self._run.spec.learner.threads,
            self.gpu_plan.learner,
        )
        return self.learner

    def scale(
        self, replicas: Mapping[str, int], learner_port: int, busy: Mapping[str, int]
    ) -> None:
        """Start and stop workers until each group has as many as wanted.

        A group whose workers keep failing waits before it starts others. The idlest leave first;
        `busy` is how many trajectories each worker has in flight.
        """
        for name, wanted in replicas.items():
            workers = self._groups[name].workers
            may_start = self._clock() >= self._groups[name].start_after_s
            while len(workers) < wanted and may_start:
                workers.append(self._start_worker(name, learner_port))
            workers.sort(key=lambda child: busy.get(child.name, 0), reverse=True)
            while len(workers) > wanted:
                worker = workers.pop()
                worker.terminate()
                self._leaving.append(worker)

    def record_productive(self, names: Iterable[str]) -> None:
        """Note workers that have delivered; a worker that failed after that did not crash-loop."""
        for group in self._groups.values():
            living = {child.name for child in group.workers}
            new = (living & set(names)) - self._productive
            group.num_productive += len(new)
            self._productive |= new

    def reap(self) -> list[LostWorker]:
        """Forget processes that have ended; returns the workers that ended unasked.

        Raises:
            RunFailedError: when a worker reports an error that the user must fix, or when workers
                keep failing before any of them has delivered.
        """
        for child in self.children:
            if child.exit_code is not None:
                child.close_stdin()
        self._leaving = [child for child in self._leaving if child.exit_code is None]
        ended = [
            (group, child)
            for group in self._groups.values()
            for child in group.workers
            if child.exit_code is not None
        ]
        for group, child in ended:
            group.workers.remove(child)
        lost = []
        for group, child in ended:
            if child.exit_code != 0:
                group.streak = group.streak.after_failure(group.num_productive)
                group.start_after_s = self._clock() + group.streak.pause_s
                self._judge(child, group.streak)
                lost.append(LostWorker(child=child, pause_s=group.streak.pause_s))
        return lost

    async def stop(self, grace_s: float) -> None:
        """Ask everybody to leave, and see that they are gone."""
        await stop_all(self.children, grace_s)

    async def wait_for_learner(self, timeout_s: float) -> bool:
        """Wait for the learner to end by itself; False when it has not in time."""
        return self.learner is None or not await wait_for_exit([self.learner], timeout_s)

    def kill(self) -> None:
        """Kill everybody at once."""
        for child in self.children:
            child.kill()

    def _judge(self, child: ChildProcess, streak: FailureStreak) -> None:
        if child.exit_code == CANNOT_START:
            raise RunFailedError(f"{child.name} {child.failure()}")
        living = {child.name for group in self._groups.values() for child in group.workers}
        if streak.failures >= MAX_WORKER_FAILURES and not living & self._productive:
            raise RunFailedError(
                f"{streak.failures} workers in a row ended before they delivered anything; the"
                f" last, {child.name}, {child.failure()}"
            )

    def _start_worker(self, group: str, learner_port: int) -> ChildProcess:
        name = f"{group}-{self._started}"
        self._started += 1
        options = [f"--learner=127.0.0.1:{learner_port}", f"--group={group}", f"--worker-id={name}"]
        options += [f"--listen={_ANY_PORT}", f"--metrics-listen={_ANY_PORT}"]
        threads = next(one.threads for one in self._run.spec.rollouts if one.name == group)
        on_gpus = Counter(self._gpu_of.get(child.name, "") for child in self.children)
        share = self.gpu_plan.next_worker(on_gpus)
        if share is not None:
            self._gpu_of[name] = share.gpu
        return self._start(name, "vcpo_rollout", options, threads, share)

    def _start(
        self,
        name: str,
        module: str,
        options: Sequence[str],
        threads: int | None,
        gpu: GpuShare | None,
    ) -> ChildProcess:
        ready_file = self._run_dir.ready_file(name)
        environment = {**SERVICE_ENVIRONMENT, **os.environ, TOKEN_VARIABLE: self.token}
        if gpu is not None:
            environment |= gpu.environment
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = [sys.executable, "-m", module, str(self._run_dir.spec), *options]
        return start_child(
            name,
            [*command, f"--ready-file={ready_file}", "--exit-with-parent"],
            log=self._run_dir.log(name),
            ready_file=ready_file,
            environment=environment,
        )
