"""Check that this machine has a GPU for each rank of a run's learner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vcpo.local.processes.gpus import TooFewGpusError, find_gpus, plan_gpus
from vcpo.spec import FieldProblem, SpecError, VCPORun


def check_gpus(run: VCPORun, run_file: Path) -> None:
    """Check that each rank of the learner has a GPU of its own, if this machine has GPUs.

    Raises:
        SpecError: naming the field, both numbers and the cure.
    """
    if problems := list(gpu_problems(run)):
        raise SpecError(str(run_file), problems)


def gpu_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield a problem if this machine has GPUs, but too few for the learner's ranks."""
    learner = run.spec.learner
    if learner.ranks_per_replica == 1:
        return
    max_workers = sum(group.max_replicas for group in run.spec.rollouts)
    try:
        plan_gpus(find_gpus(), max_workers=max_workers, num_ranks=learner.ranks_per_replica)
    except TooFewGpusError as error:
        field = "processes" if learner.processes is not None else "gpusPerReplica"
        yield FieldProblem(
            path=f"spec.learner.{field}", value=str(learner.ranks_per_replica), message=str(error)
        )
