"""The processes of a local run: the ranks of its learner and the desired rollout workers."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vcpo.api import VCPORun
from vcpo.control.run_limits import MAX_WORKER_FAILURES, FailureStreak
from vcpo.local.models import kv_cache_bytes, worker_bytes
from vcpo.local.processes.child import (
    ChildProcess,
    free_port,
    rank_name,
    rank_variables,
    start_child,
    stop_children,
)
from vcpo.local.processes.forks import ForkedProcess, can_fork
from vcpo.local.processes.gpus import GpuPlan, GpuShare, gpu_bytes, plan_gpus
from vcpo.local.run_dir import RunDir
from vcpo.service.lifecycle import CANNOT_START, DRAINED, SERVICE_ENVIRONMENT
from vcpo.service.process import module_command
from vcpo.wire.access.roles import (
    LEARNER_ROLES,
    WORKER_ROLES,
    CallerRole,
    key_variables,
    new_run_keys,
)

LEARNER_MODULE: Final = "vcpo_learner"
_ANY_PORT = "127.0.0.1:0"
_LEAST_CACHE = 1 / 16
"""GiB of keys and values, as the field has it."""


class RunFailedError(RuntimeError):
    """The run cannot start or continue, and a restart of the process would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that failed."""

    child: ChildProcess
    pause_s: float
    """Seconds for which its group waits before it starts another worker."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """The workers of a rollout group and the failures of earlier workers."""

    workers: list[ChildProcess]
    streak: FailureStreak
    num_productive: int = 0
    """Number of workers so far that submitted trajectories; this is the group's progress."""
    start_after_s: float = 0.0


class Fleet:
    """Starts and stops the processes of one local run.

    learner_module: module that each rank of the learner runs.
    """

    def __init__(
        self,
        run: VCPORun,
        run_dir: RunDir,
        *,
        gpus: Sequence[str] = (),
        learner_module: str = LEARNER_MODULE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = new_run_keys()
        self.forks: list[ForkedProcess] = []
        """Processes that wait with their imports done; those that start first are these."""
        self.learner_ranks: list[ChildProcess] = []
        """The learner's processes by rank; empty before the first start."""
        self._run = run
        self._run_dir = run_dir
        self._learner_module = learner_module
        self._clock = clock
        self._groups = {
            group.name: _Group(workers=[], streak=FailureStreak()) for group in run.spec.rollouts
        }
        self.gpu_plan = _gpu_plan(run, gpus)
        self._gpu_of: dict[str, str] = {}
        """GPU of every worker that was ever started, if there are GPUs."""
        self._stopping: list[ChildProcess] = []
        self._started = 0
        self._productive: set[str] = set()
        """Names of the workers that submitted trajectories."""

    @property
    def steering_key(self) -> str:
        return self._keys[CallerRole.STEERING]

    @property
    def workers(self) -> Mapping[str, Sequence[ChildProcess]]:
        return {name: group.workers for name, group in self._groups.items()}

    @property
    def children(self) -> list[ChildProcess]:
        workers = [child for group in self._groups.values() for child in group.workers]
        return [*self.learner_ranks, *workers, *self._stopping]

    def start_learner(self, *, resume: bool, port: int = 0) -> Sequence[ChildProcess]:
        """Start the learner's ranks, of which the first serves on a port; 0 takes a free port."""
        for child in self.learner_ranks:
            child.close_stdin()
        learner = self._run.spec.learner
        num_ranks = learner.ranks_per_replica
        options = [f"--listen=127.0.0.1:{port}", f"--metrics-listen={_ANY_PORT}"]
        options += [f"--run-dir={self._run_dir.path}", f"--drained-status={DRAINED}"]
        options += ["--resume"] if resume else []
        meeting_port = free_port() if num_ranks > 1 else 0
        self.learner_ranks = [
            self._start(
                rank_name(rank),
                self._learner_module,
                options,
                learner.threads,
                self.gpu_plan.learner,
                {
                    **key_variables(self._keys, LEARNER_ROLES),
                    **rank_variables(rank, num_ranks=num_ranks, port=meeting_port),
                },
                self.forks,
            )
            for rank in range(num_ranks)
        ]
        return self.learner_ranks

    def scale(
        self, replicas: Mapping[str, int], learner_port: int, busy: Mapping[str, int]
    ) -> None:
        """Start and stop workers until each group has its desired number.

        A group whose workers keep failing pauses before it starts another. The workers with the
        fewest trajectories in flight are stopped first.
        busy: trajectories in flight by worker.
        """
        for name, desired in replicas.items():
            workers = self._groups[name].workers
            may_start = self._clock() >= self._groups[name].start_after_s
            while len(workers) < desired and may_start:
                workers.append(self._start_worker(name, learner_port))
            workers.sort(key=lambda child: busy.get(child.name, 0), reverse=True)
            while len(workers) > desired:
                worker = workers.pop()
                worker.terminate()
                self._stopping.append(worker)

    def record_productive(self, names: Iterable[str]) -> None:
        """Record workers that submitted; a worker that fails after that does not crash-loop."""
        for group in self._groups.values():
            living = {child.name for child in group.workers}
            new = (living & set(names)) - self._productive
            group.num_productive += len(new)
            self._productive |= new

    def reap(self) -> list[LostWorker]:
        """Remove processes that have ended; return the workers that failed.

        Raises:
            RunFailedError: if a worker reports a start error, or if workers keep failing before
                any of them submits.
        """
        for child in self.children:
            if child.exit_code is not None:
                child.close_stdin()
        self._stopping = [child for child in self._stopping if child.exit_code is None]
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
                self._check_failure(child, group.streak)
                lost.append(LostWorker(child=child, pause_s=group.streak.pause_s))
        return lost

    async def stop(self, grace_s: float) -> None:
        await stop_children(self.children, grace_s)
        for fork in self.forks:
            fork.stdin.close()

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    def _check_failure(self, child: ChildProcess, streak: FailureStreak) -> None:
        if child.exit_code == CANNOT_START:
            raise RunFailedError(f"{child.name} {child.describe_failure()}")
        living = {child.name for group in self._groups.values() for child in group.workers}
        if streak.failures >= MAX_WORKER_FAILURES and not living & self._productive:
            raise RunFailedError(
                f"{streak.failures} workers in a row ended before they submitted a trajectory; the"
                f" last one, {child.name}, {child.describe_failure()}"
            )

    def _start_worker(self, group: str, learner_port: int) -> ChildProcess:
        while (name := f"{group}-{self._started}") in {rank.name for rank in self.learner_ranks}:
            self._started += 1  # a group may be called `learner`
        self._started += 1
        options = [f"--learner=127.0.0.1:{learner_port}", f"--group={group}", f"--worker-id={name}"]
        options += [f"--listen={_ANY_PORT}", f"--metrics-listen={_ANY_PORT}"]
        spec = next(one for one in self._run.spec.rollouts if one.name == group)
        on_gpus = Counter(self._gpu_of.get(child.name, "") for child in self.children)
        share = self.gpu_plan.share_for_next_worker(on_gpus)
        if share is not None:
            self._gpu_of[name] = share.gpu
        variables = key_variables(self._keys, WORKER_ROLES)
        forks = self.forks if can_fork(self._run, spec) else []
        return self._start(name, "vcpo_rollout", options, spec.threads, share, variables, forks)

    def _start(
        self,
        name: str,
        module: str,
        options: Sequence[str],
        threads: int | None,
        gpu: GpuShare | None,
        variables: Mapping[str, str],
        forks: list[ForkedProcess],
    ) -> ChildProcess:
        ready_file = self._run_dir.ready_file(name)
        environment = {**SERVICE_ENVIRONMENT, **os.environ, **variables}
        if gpu is not None:
            environment |= gpu.environment
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = module_command(module, str(self._run_dir.spec), *options)
        return start_child(
            name,
            [*command, f"--ready-file={ready_file}", "--exit-with-parent"],
            log=self._run_dir.log(name),
            ready_file=ready_file,
            environment=environment,
            fork=forks.pop(0) if forks else None,
        )


def with_kv_cache(run: VCPORun, gpus: Sequence[str]) -> VCPORun:
    """Return the run whose workers on the learner's GPU are told the size of their cache.

    vLLM then measures no free memory, and may start while the learner takes its own.
    """
    plan, spec = _gpu_plan(run, gpus), run.spec
    if not plan.is_shared or plan.workers[0].memory_ratio != _worker_ratio(run, gpus):
        return run  # they need more than they can have, or nobody knows how much
    sizes = (kv_cache_bytes(spec, group) or 0 for group in spec.rollouts)
    groups = tuple(
        group.model_copy(update={"kv_cache_gibibytes": max(_LEAST_CACHE, size / 2**30)})
        for group, size in zip(spec.rollouts, sizes, strict=True)
    )
    return run.model_copy(update={"spec": spec.model_copy(update={"rollouts": groups})})


def _gpu_plan(run: VCPORun, gpus: Sequence[str]) -> GpuPlan:
    return plan_gpus(
        gpus,
        max_workers=sum(group.max_replicas for group in run.spec.rollouts),
        num_ranks=run.spec.learner.ranks_per_replica,
        gpus_per_worker=max(group.tensor_parallel_size for group in run.spec.rollouts),
        worker_ratio=_worker_ratio(run, gpus),
    )


def _worker_ratio(run: VCPORun, gpus: Sequence[str]) -> float:
    """Return the share of a single GPU that a worker needs; 1 if nobody knows."""
    needed = worker_bytes(run.spec) if len(gpus) == 1 else None
    held = None if needed is None else gpu_bytes(gpus[0])
    return 1.0 if needed is None or held is None else needed / held
