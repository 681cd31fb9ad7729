"""The GPUs of this machine, and which process of a local run gets which.

```
two or more   learner: the first, alone     workers: the others, one each; then several share one
one           learner: 0.6 of its memory    workers: 0.3 of it together
none          nobody is told anything
```
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
"""Of a GPU's memory; the rest is for contexts and fragments."""
_LEARNER_RATIO = 0.6
"""Where everybody shares one: parameters, gradients and AdamW's moments take 16 bytes a parameter
at the learner, and 2 to 4 at a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    identifier: str
    """As `CUDA_VISIBLE_DEVICES` names it."""
    name: str = ""
    memory_mebibytes: int | None = None
    """None is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """What one process may use of one GPU."""

    gpu: str
    memory_ratio: float | None
    """Largest share of its memory, in (0, 1]; None is all that is free."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that hold a process to it."""
        # The order that nvidia-smi counts in, rather than the fastest first.
        held = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.gpu}
        if self.memory_ratio is not None:
            held[GPU_MEMORY_VARIABLE] = f"{self.memory_ratio:.4f}"
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Who gets what, for as many workers as the run may have."""

    learner: GpuShare | None
    workers: tuple[GpuShare, ...]
    """One for each GPU that workers run on; empty when there is none."""
    max_workers: int

    def next_worker(self, num_workers: Mapping[str, int]) -> GpuShare | None:
        """What one more worker gets, by how many there are on each GPU; None without GPUs."""
        return min(self.workers, key=lambda each: num_workers.get(each.gpu, 0), default=None)

    @property
    def sentence(self) -> str:
        """Who gets what, in words; empty without GPUs."""
        if self.learner is None:
            return ""
        named = ", ".join(each.gpu for each in self.workers)
        said = f"learner on GPU {self.learner.gpu}, rollout workers on GPU {named}"
        if self.learner.memory_ratio is not None:
            said += (
                f": they share its memory, {self.learner.memory_ratio:.2f} for the learner and"
                f" {self.workers[0].memory_ratio:.2f} for each of {self.max_workers} workers;"
                " a lower maxReplicas leaves each more"
            )
        elif self.max_workers > len(self.workers):
            said += (
                f": up to {self.max_workers} workers share {len(self.workers)},"
                f" {self.workers[0].memory_ratio:.2f} of its memory each; to give each its own,"
                f" set the groups' maxReplicas to {len(self.workers)} together"
            )
        return said


def plan_gpus(gpus: Sequence[Gpu], *, max_workers: int) -> GpuPlan:
    """Give out GPUs so that what runs on one at a time fits into its memory."""
    if not gpus:
        return GpuPlan(learner=None, workers=(), max_workers=max_workers)
    first, *others = (gpu.identifier for gpu in gpus)
    if not others:
        ratio = (_USABLE_RATIO - _LEARNER_RATIO) / max_workers
        return GpuPlan(
            learner=GpuShare(gpu=first, memory_ratio=_LEARNER_RATIO),
            workers=(GpuShare(gpu=first, memory_ratio=ratio),),
            max_workers=max_workers,
        )
    most_on_one = -(-max_workers // len(others))
    return GpuPlan(
        learner=GpuShare(gpu=first, memory_ratio=None),
        workers=tuple(
            GpuShare(gpu=other, memory_ratio=_USABLE_RATIO / most_on_one) for other in others
        ),
        max_workers=max_workers,
    )


def find_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that processes started here may use, as nvidia-smi and the user say."""
    return usable_gpus(environment.get("CUDA_VISIBLE_DEVICES"), _ask_driver())


def usable_gpus(visible_devices: str | None, found: Sequence[Gpu]) -> list[Gpu]:
    """Those of the GPUs `found` that `CUDA_VISIBLE_DEVICES` leaves, in its order.

    CUDA stops reading at the first entry that names none, such as -1. None leaves all.
    """
    if visible_devices is None:
        return list(found)
    known = {gpu.identifier: gpu for gpu in found}
    usable: list[Gpu] = []
    for entry in visible_devices.split(","):
        identifier = entry.strip()
        if not identifier or identifier.startswith("-"):
            break
        usable.append(known.get(identifier, Gpu(identifier=identifier)))
    return usable


def parse_gpus(csv: str) -> list[Gpu]:
    """Read what nvidia-smi prints for index, name and total memory in MiB; other lines are none."""
    gpus = []
    for line in csv.splitlines():
        index, _, rest = line.partition(",")
        name, _, memory = rest.rpartition(",")
        if index.strip().isdecimal():
            # A GPU whose memory is not its own, as of a Grace Hopper, says [N/A].
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
