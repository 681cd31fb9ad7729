"""One gradient on two ranks, beside the same on one."""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from benchmarks.model_families.learner_side import (
    learner_logprobs,
    load_learner,
    make_spec,
    random_trajectories,
    rescored,
)
from vcpo.api import VCPORunSpec
from vcpo.local.processes.child import free_port
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.model.loading import pad_token_id
from vcpo_learner.model.skeleton import load_on_ranks
from vcpo_learner.ranks.ranks import RankEnvironment, join_ranks
from vcpo_learner.ranks.sharding import whole
from vcpo_learner.update.micro_batches import MicroBatchRunner
from vcpo_learner.update.policy_update import PolicyUpdate

_RANKS: Final = 2
_CONTEXT = multiprocessing.get_context("fork")


def ranks_difference(folder: Path, method: str) -> float:
    """Compare the gradient of two ranks with that of one: |difference| / |gradient|.

    The process must have run no thread yet: the ranks are its forks.

    method: of the run.

    Raises:
        StartError: if the learner refuses the model.
    """
    trajectories = _scored(folder)
    port = free_port()
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(_RANKS)]
    ranks = [
        _CONTEXT.Process(target=_report, args=(pipe[1], rank, port, folder, method, trajectories))
        for rank, pipe in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    found = [_answer(pipe[0]) for pipe in pipes]
    for rank in ranks:
        rank.join()
    alone = _gradient(RankEnvironment(), folder, method, trajectories)
    return max(_relative_difference(alone, each) for each in found)


def _scored(folder: Path) -> list[Trajectory]:
    """Trajectories of one group, on policy."""
    spec = make_spec(folder)
    trajectories = random_trajectories()
    network, pad = load_learner(spec)
    runner = MicroBatchRunner(network, spec, pad)
    return rescored(trajectories, learner_logprobs(runner, trajectories))


def _spec(folder: Path, size: int, method: str) -> VCPORunSpec:
    return make_spec(
        folder,
        learner={"processes": size, "collectiveTimeoutSeconds": 60},
        algorithm={"method": method},
        batch={"microBatchTrajectories": 2},
    )


def _gradient(
    environment: RankEnvironment, folder: Path, method: str, trajectories: Sequence[Trajectory]
) -> dict[str, Tensor]:
    """Return the whole gradient of a batch by parameter; all ranks call it at the same time."""
    torch.set_num_threads(1)
    spec = _spec(folder, environment.size, method)
    ranks = join_ranks(environment, spec.learner, "cpu")
    network, tokenizer = load_on_ranks(spec.model, ranks, spec.learner.number_format)
    update = PolicyUpdate(network, spec, pad_token_id(tokenizer), ranks=ranks)
    update.begin([trajectories], policy_version=0)
    gradient = {
        name: whole(each.grad)
        for name, each in network.model.named_parameters()
        if each.grad is not None
    }
    ranks.close()
    return gradient


def _report(
    pipe: Any, rank: int, port: int, folder: Path, method: str, trajectories: Sequence[Trajectory]
) -> None:
    environment = RankEnvironment(rank=rank, size=_RANKS, port=port, hosts_store=rank == 0)
    try:
        gradient = _gradient(environment, folder, method, trajectories)
        pipe.send({name: each.numpy() for name, each in gradient.items()})
    except Exception as error:  # noqa: BLE001 - raised again in the other process
        pipe.send(error)


def _answer(pipe: Any) -> dict[str, Tensor]:
    """Return the gradient that a rank sends.

    Raises:
        Exception: what the rank has raised.
    """
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return {name: torch.from_numpy(each) for name, each in found.items()}


def _relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return |one - other| / |one| over all parameters; a parameter that is missing is 0."""
    total = difference = 0.0
    for name in one.keys() | other.keys():
        mine, theirs = (each.get(name, torch.tensor(0.0)).double() for each in (one, other))
        total += float(mine.square().sum())
        difference += float((mine - theirs).square().sum())
    return cast("float", (difference / total) ** 0.5)
