"""Check that this machine has the GPUs that a run's learner and each of its workers need."""

from __future__ import annotations

from collections.abc import Iterator

from vcpo.api import FieldProblem, VCPORun
from vcpo.local.processes.gpus import (
    TooFewGpusError,
    TooFewWorkerGpusError,
    find_gpus,
    plan_gpus,
)


def gpu_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield a problem if this machine has GPUs, but too few for the ranks or for a worker.

    It names the field, both numbers and the cure.
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
    except TooFewWorkerGpusError as error:
        yield FieldProblem(
            path=f"spec.rollouts[{largest}].tensorParallelSize",
            value=str(gpus_per_worker),
            message=str(error),
        )
    except TooFewGpusError as error:
        field = "processes" if learner.processes is not None else "gpusPerReplica"
        yield FieldProblem(
            path=f"spec.learner.{field}", value=str(learner.ranks_per_replica), message=str(error)
        )
