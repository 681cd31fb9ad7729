"""The GPUs of this machine, and their assignment to the processes of a local run.

```
GPUs          learner                       workers
two or more   the first GPU, alone          the other GPUs, one each, then several per GPU
one           0.6 of its memory             0.3 of its memory together
none          no setting                    no setting
```
A learner of several ranks has a GPU for each, and the workers have the others; ranks and workers
share no GPU. Rank i computes on the i-th GPU that the learner's processes see, as under torchrun.
If an engine splits its model, each worker gets as many GPUs as the largest engine needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcpo.service.lifecycle import GPU_MEMORY_VARIABLE

_QUERY = ("--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 20.0
_USABLE_RATIO = 0.9
"""Usable share of a GPU's memory; CUDA contexts and fragmentation take the rest."""
_LEARNER_RATIO = 0.6
"""The learner's share of a single GPU's memory. Parameters, gradients and AdamW's moments take 16
bytes per parameter at the learner; a worker takes 2 to 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    identifier: str
    """The GPU's name in `CUDA_VISIBLE_DEVICES`."""
    name: str = ""
    memory_mebibytes: int | None = None
    """Total memory; None if unknown."""


class TooFewGpusError(ValueError):
    """The machine has GPUs, but not one for each rank of the learner and one for the workers."""


class TooFewWorkerGpusError(TooFewGpusError):
    """The machine has GPUs, but beside the learner's not as many as one worker needs."""


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
    """Sum of the groups' maxReplicas."""

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
                " with a lower maxReplicas each gets more"
            )
        elif self.max_workers > len(self.workers):
            text += (
                f": up to {self.max_workers} workers share {len(self.workers)},"
                f" {self.workers[0].memory_ratio:.2f} of its memory each; to give each its own,"
                f" set the groups' maxReplicas to {len(self.workers)} together"
            )
        return text


def plan_gpus(
    gpus: Sequence[Gpu], *, max_workers: int, num_ranks: int = 1, gpus_per_worker: int = 1
) -> GpuPlan:
    """Assign GPUs so that the processes of one GPU fit into its memory together.

    num_ranks: processes of the learner.
    gpus_per_worker: GPUs over which a worker splits the model; the largest number of all groups.

    Raises:
        TooFewGpusError: if there are GPUs, but too few for the ranks or for one worker; the text
            says what to change.
    """
    if not gpus:
        return GpuPlan(learner=None, workers=(), max_workers=max_workers)
    _check_ranks(num_ranks, num_gpus=len(gpus))
    identifiers = [gpu.identifier for gpu in gpus]
    own, others = identifiers[:num_ranks], identifiers[num_ranks:]
    if gpus_per_worker > max(1, len(others)):
        raise TooFewWorkerGpusError(
            f"a worker needs {gpus_per_worker} GPUs and the learner {num_ranks} of its own, and"
            f" this machine has {len(gpus)}; set it to at most {max(1, len(others))}"
        )
    if not others:
        ratio = (_USABLE_RATIO - _LEARNER_RATIO) / max_workers
        return GpuPlan(
            learner=GpuShare(gpu=own[0], memory_ratio=_LEARNER_RATIO),
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


def find_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that nvidia-smi reports and `CUDA_VISIBLE_DEVICES` allows."""
    return usable_gpus(environment.get("CUDA_VISIBLE_DEVICES"), _ask_driver())


def usable_gpus(visible_devices: str | None, found: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` allows, in its order.

    visible_devices: the variable's value; None allows all GPUs. As in CUDA, the first entry that
        is empty or negative, such as -1, ends the list.
    found: GPUs of the machine.
    """
    if visible_devices is None:
        return list(found)
    by_identifier = {gpu.identifier: gpu for gpu in found}
    usable: list[Gpu] = []
    for entry in visible_devices.split(","):
        identifier = entry.strip()
        if not identifier or identifier.startswith("-"):
            break
        usable.append(by_identifier.get(identifier, Gpu(identifier=identifier)))
    return usable


def parse_gpus(csv: str) -> list[Gpu]:
    """Read nvidia-smi's lines of index, name and total memory in MiB; ignore other lines."""
    gpus = []
    for line in csv.splitlines():
        index, _, rest = line.partition(",")
        name, _, memory = rest.rpartition(",")
        if index.strip().isdecimal():
            # A GPU without memory of its own, such as a Grace Hopper's, reports [N/A].
            size = int(memory) if memory.strip().isdecimal() else None
            gpus.append(Gpu(identifier=index.strip(), name=name.strip(), memory_mebibytes=size))
    return gpus


def _ask_driver() -> list[Gpu]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(  # noqa: S603 - the driver's own tool, found on the PATH
            [command, *_QUERY],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(answer.stdout) if answer.returncode == 0 else []
