"""Processes of a local run that wait for their orders with all imports done.

Imports are nine tenths of what a process computes before it works. `vcpo run` does them once and
forks, while it has one thread, no GPU and no channel. The end of the input from which a fork reads
its orders ends it, whatever it does.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import IO, Final

from vcpo.api import VCPORun
from vcpo.api.workloads import EngineName, RolloutGroup
from vcpo.service.lifecycle import SERVICE_ENVIRONMENT, wake_at_parent_exit
from vcpo.service.process import end_with

_VARIABLE: Final = "VCPO_FORK"
"""Environment variable; with 0 each process of a local run imports for itself."""
_MODULES: Final = ("vcpo_learner.command", "vcpo_rollout.command", "vcpo_rollout.engines.hf.engine")
_SPARE: Final = 2  # for workers that are added later, and for restarts


@dataclass
class ForkedProcess:
    """A fork of this process, as `subprocess.Popen` shows a child."""

    pid: int
    stdin: IO[bytes]
    _exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code

    def order(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Have it run a `module_command` and append its output to a log."""
        orders = [*command[3:], str(log), {**environment}]
        with suppress(BrokenPipeError):  # it was killed, which the host sees as of any child
            self.stdin.write(json.dumps(orders).encode() + b"\n")


def can_fork(run: VCPORun, group: RolloutGroup) -> bool:
    """Return whether a group's workers can have the learner's imports, and OpenMP its threads."""
    return group.engine_name != EngineName.VLLM and group.threads == run.spec.learner.threads


def fork_services(run: VCPORun, *, has_gpus: bool) -> list[ForkedProcess]:
    """Import and fork what a run starts first; nothing where that is impossible or switched off.

    The caller has no thread that stays, and no file open that must not outlive it.
    """
    workers = [group.min_replicas for group in run.spec.rollouts if can_fork(run, group)]
    is_possible = sys.platform == "linux" and None not in {sys.stdin, sys.stdout, sys.stderr}
    if has_gpus or not workers or not is_possible or os.environ.get(_VARIABLE) == "0":
        return []
    if sys.stderr.isatty():  # a status would be a thread
        sys.stderr.write("loading torch and transformers\n")
    before = dict(os.environ)
    os.environ.update({**SERVICE_ENVIRONMENT, **before})
    if (threads := run.spec.learner.threads) is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        for module in _MODULES:
            import_module(module)
        if not _is_alone():
            return []
        return _fork(run.spec.learner.ranks_per_replica + sum(workers) + _SPARE)
    except Exception:  # noqa: BLE001 - of a library; a process that imports for itself tells it
        return []
    finally:
        os.environ.clear()
        os.environ.update(before)


def _is_alone() -> bool:
    """Return whether this is the only thread; one of a status that was shown ends first.

    The system has a thread for a moment after Python has joined it.
    """
    deadline_s = time.monotonic() + 5.0
    while len(list(Path("/proc/self/task").iterdir())) > 1:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def _fork(number: int) -> list[ForkedProcess]:
    gc.freeze()
    sys.stdout.flush()
    forks: list[ForkedProcess] = []
    for _ in range(number):
        reader, writer = os.pipe()
        not_its = [writer, *(each.stdin.fileno() for each in forks)]
        if (pid := os.fork()) == 0:
            end_with(lambda: _work(reader, not_its))  # noqa: B023 - it is called here
        os.close(reader)
        forks.append(ForkedProcess(pid, os.fdopen(writer, "wb", buffering=0)))
    return forks


def _work(reader: int, not_its: Iterable[int]) -> None:
    wake_at_parent_exit()
    os.setsid()
    os.dup2(reader, 0)
    for descriptor in (reader, *not_its):
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    if not (orders := sys.stdin.readline()):
        return
    module, *sys.argv[1:], log, environment = json.loads(orders)
    with Path(log).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    import_module("numpy.random").seed()  # Python's own generator does so itself
    run_module(module, run_name="__main__", alter_sys=True)
