"""What this machine's GPUs mean for a run: are they enough, and which defaults fit them?"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from vcpo.api import FieldProblem, GpuUse, VCPORun, VCPORunSpec
from vcpo.local.processes.gpus import TooFewGpusError, find_gpus, plan_gpus


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
