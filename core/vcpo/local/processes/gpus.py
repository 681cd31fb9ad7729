"""The GPUs of this machine, and their assignment to the processes of a local run.

```
GPUs          learner                       workers
two or more   the first GPU, alone          the other GPUs, one each, then several per GPU
one           the rest, 0.6 at least        what they need, at most 0.3 together
none          no setting                    no setting
```
A learner of several ranks has a GPU for each, and the workers have the others; ranks and workers
share no GPU. Rank i computes on the i-th GPU that the learner's processes see, as under torchrun.
If an engine splits its model, each worker gets as many GPUs as the largest engine needs.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile

from vcpo.api import FieldProblem, GpuUse, VCPORun, VCPORunSpec
from vcpo.service.lifecycle import GPU_MEMORY_VARIABLE

_FORMAT = "--format=csv,noheader,nounits"
_QUERY_TIMEOUT_S = 20.0
_USABLE_RATIO = 0.9
"""Usable share of a GPU's memory; CUDA contexts and fragmentation take the rest."""
_LEARNER_RATIO = 0.6
"""The least share of a single GPU's memory that the learner gets. Parameters, gradients and AdamW's
moments take 16 bytes per parameter at the learner; a worker takes 2 to 4."""


class TooFewGpusError(ValueError):
    """The machine has GPUs, but not one for each rank of the learner, or too few for a worker."""

    def __init__(self, message: str, *, of_worker: bool = False) -> None:
        super().__init__(message)
        self.of_worker = of_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """The share of GPUs that a process may use."""

    gpu: str
    """The GPU; several of one process, or of a learner's ranks, with commas between."""
    memory_ratio: float | None
    """Largest share of the memory, in (0, 1]; None is no limit."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that restrict a process to this share."""
        # Number the GPUs as nvidia-smi does; CUDA's default is the fastest first.
        variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.gpu}
        if self.memory_ratio is not None:
            variables[GPU_MEMORY_VARIABLE] = f"{self.memory_ratio:.4f}"
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Assignment of GPUs to the learner and to the largest number of workers."""

    learner: GpuShare | None
    workers: tuple[GpuShare, ...]
    """A worker's share of each GPU that workers use; empty without GPUs."""
    max_workers: int

    def share_for_next_worker(self, num_workers: Mapping[str, int]) -> GpuShare | None:
        """Return the share on the GPU with the fewest workers; None without GPUs.

        num_workers: number of workers by GPU.
        """
        return min(self.workers, key=lambda each: num_workers.get(each.gpu, 0), default=None)

    @property
    def is_shared(self) -> bool:
        return self.learner is not None and self.learner.memory_ratio is not None

    @property
    def description(self) -> str:
        """The assignment in one sentence; empty without GPUs."""
        if self.learner is None:
            return ""
        named = ", ".join(each.gpu for each in self.workers)
        text = f"learner on GPU {self.learner.gpu}, rollout workers on GPU {named}"
        if self.learner.memory_ratio is not None:
            text += (
                f": they share its memory, {self.learner.memory_ratio:.2f} for the learner and"
                f" {self.workers[0].memory_ratio:.2f} for each of {self.max_workers} workers;"
                " with a lower maxReplicas others get more"
            )
        elif self.max_workers > len(self.workers):
            text += (
                f": up to {self.max_workers} workers share {len(self.workers)},"
                f" {self.workers[0].memory_ratio:.2f} of its memory each; to give each its own,"
                f" set the groups' maxReplicas to {len(self.workers)} together"
            )
        return text


def plan_gpus(
    gpus: Sequence[str],
    *,
    max_workers: int,
    num_ranks: int = 1,
    gpus_per_worker: int = 1,
    worker_ratio: float = 1.0,
) -> GpuPlan:
    """Assign GPUs so that the processes of one GPU fit into its memory together.

    gpus: names in `CUDA_VISIBLE_DEVICES`.
    num_ranks: processes of the learner.
    gpus_per_worker: GPUs over which a worker splits the model; the largest number of all groups.
    worker_ratio: share of a GPU's memory that a worker needs; 1 if nobody knows.

    Raises:
        TooFewGpusError: if there are GPUs, but too few for the ranks or for one worker; the text
            says what to change.
    """
    if not gpus:
        return GpuPlan(learner=None, workers=(), max_workers=max_workers)
    _check_ranks(num_ranks, num_gpus=len(gpus))
    own, others = gpus[:num_ranks], gpus[num_ranks:]
    if gpus_per_worker > max(1, len(others)):
        raise TooFewGpusError(
            f"a worker needs {gpus_per_worker} GPUs and the learner {num_ranks} of its own, and"
            f" this machine has {len(gpus)}; set it to at most {max(1, len(others))}",
            of_worker=True,
        )
    if not others:
        ratio = min(worker_ratio, (_USABLE_RATIO - _LEARNER_RATIO) / max_workers)
        return GpuPlan(
            learner=GpuShare(gpu=own[0], memory_ratio=_USABLE_RATIO - max_workers * ratio),
            workers=(GpuShare(gpu=own[0], memory_ratio=ratio),),
            max_workers=max_workers,
        )
    starts = range(0, len(others) - gpus_per_worker + 1, gpus_per_worker)
    shares = [",".join(others[start : start + gpus_per_worker]) for start in starts]
    most_on_one = -(-max_workers // len(shares))
    return GpuPlan(
        learner=GpuShare(gpu=",".join(own), memory_ratio=None),
        workers=tuple(
            GpuShare(gpu=share, memory_ratio=_USABLE_RATIO / most_on_one) for share in shares
        ),
        max_workers=max_workers,
    )


def _check_ranks(num_ranks: int, *, num_gpus: int) -> None:
    """Check that ranks and workers need not share a GPU; only a single rank may."""
    if num_ranks == 1 or num_ranks < num_gpus:
        return
    message = (
        f"the learner's {num_ranks} ranks need a GPU each and the rollout workers one more, and"
        f" this machine has {num_gpus}; "
    )
    if num_gpus == 1:
        raise TooFewGpusError(f"{message}set it to 1: learner and workers then share the GPU")
    raise TooFewGpusError(f"{message}set it to at most {num_gpus - 1}")


def find_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` names; without it, those of nvidia-smi.

    As in CUDA, the first entry that is empty or negative, such as -1, ends the list.
    """
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is None:
        return [each for each in _ask_driver("--query-gpu=index") if each.isdecimal()]
    entries = (entry.strip() for entry in visible.split(","))
    return list(takewhile(lambda entry: entry and not entry.startswith("-"), entries))


def gpu_bytes(gpu: str) -> int | None:
    """Return the memory of a GPU; None if the driver does not say."""
    answer = _ask_driver("--query-gpu=memory.total", f"--id={gpu}")
    return int(answer[0]) << 20 if answer and answer[0].isdecimal() else None


def gpu_name(gpu: str) -> str:
    """Return what a GPU is called, such as `NVIDIA H200`; empty if the driver does not say."""
    return " ".join(_ask_driver("--query-gpu=name", f"--id={gpu}"))


def _ask_driver(*query: str) -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(  # noqa: S603 - the driver's own tool, found on the PATH
            [command, *query, _FORMAT],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.split() if answer.returncode == 0 else []


def local_gpu_use(spec: VCPORunSpec) -> GpuUse:
    """Return which parts of a local run compute on GPUs: all, if this machine has one."""
    torch_build = _version("torch")
    has_gpus = bool(find_gpus()) and not (torch_build or "").endswith("+cpu")
    # vLLM for CPUs has the same module, and a distribution of another name.
    return GpuUse.of_machine(spec, has_gpus=has_gpus, has_vllm=_version("vllm") is not None)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def gpu_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield a problem if this machine has GPUs, but too few for the ranks or for a worker.

    It names the field, both numbers and the fix.
    """
    learner, groups = run.spec.learner, run.spec.rollouts
    largest = max(range(len(groups)), key=lambda index: groups[index].tensor_parallel_size)
    gpus_per_worker = groups[largest].tensor_parallel_size
    if learner.ranks_per_replica == gpus_per_worker == 1:
        return
    try:
        plan_gpus(
            find_gpus(),
            max_workers=sum(group.max_replicas for group in groups),
            num_ranks=learner.ranks_per_replica,
            gpus_per_worker=gpus_per_worker,
        )
    except TooFewGpusError as error:
        field = "processes" if learner.processes is not None else "gpusPerReplica"
        path, value = f"spec.learner.{field}", learner.ranks_per_replica
        if error.of_worker:
            path, value = f"spec.rollouts[{largest}].tensorParallelSize", gpus_per_worker
        yield FieldProblem(path=path, value=str(value), message=str(error))
