"""The policy that all ranks train: every rank meets the others, loads it and builds its update."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vcpo.api import VCPORunSpec
from vcpo.api.learner import Learner
from vcpo.service.lifecycle import StartError, gpu_memory_ratio, keep_freed_memory
from vcpo.service.rotary_table import table_problems
from vcpo_learner.model.loading import pad_token_id
from vcpo_learner.model.skeleton import load_on_ranks
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import RankEnvironment, Ranks, join_ranks
from vcpo_learner.update.policy_update import PolicyUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOnRanks:
    """What a rank trains, and how it hears of the others. Owner: the tensor thread."""

    ranks: Ranks
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    update: PolicyUpdate
    commands: Commands

    @classmethod
    def load(cls, spec: VCPORunSpec, environment: RankEnvironment) -> PolicyOnRanks:
        """Wait for the other ranks and load the policy, as every rank does.

        Raises:
            LostRankError: naming the ranks that did not come.
        """
        require_ranks(spec.learner, environment)
        _set_threads(spec.learner, environment)
        ranks = join_ranks(
            environment, spec.learner, "cuda" if torch.cuda.is_available() else "cpu"
        )
        if ranks.device.type == "cuda" and (ratio := gpu_memory_ratio()) is not None:
            torch.cuda.set_per_process_memory_fraction(ratio, ranks.device)
        if ranks.device.type == "cpu":
            keep_freed_memory()
        torch.manual_seed(spec.seed)
        # Tiny weights give denormal gradients, which a CPU computes about twenty times slower.
        torch.set_flush_denormal(True)
        try:
            network, tokenizer = load_on_ranks(
                spec.model, ranks, spec.learner.number_format, spec.context_tokens
            )
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"spec.model.name: the parameters of {spec.model.name!r} do not fit on a GPU of the"
                f" learner ({error!s:.120}...); give it a larger one, or shard the model"
                " (spec.learner.gpusPerReplica)"
            ) from error
        model = cast("PreTrainedModel", network.model)
        if problems := [*map(str, table_problems(spec, model.config.to_dict()))]:
            raise StartError("; ".join(problems))
        commands = Commands(ranks)
        update = PolicyUpdate(
            network, spec, pad_token_id(tokenizer), ranks=ranks, commands=commands
        )
        return cls(
            ranks=ranks,
            model=model,
            tokenizer=tokenizer,
            update=update,
            commands=commands,
        )

    def close(self) -> None:
        """Wait for the save in flight; rank 0 also ends the others; then leave the ranks."""
        if self.commands.is_broken:
            return
        self.update.close()
        if self.ranks.is_leader:
            self.commands.stop()
        self.ranks.close()


def require_ranks(learner: Learner, environment: RankEnvironment) -> None:
    """Check that as many processes were started as the run has ranks."""
    started, processes = environment.size, learner.ranks_per_replica
    if started == learner.ranks:
        return
    field = "gpusPerReplica" if learner.processes is None and processes > 1 else "processes"
    nodes = f"--nnodes {learner.replicas} " if learner.replicas > 1 else ""
    raise StartError(
        f"spec.learner.{field}: {learner.replicas} x {processes} ranks are asked for, but"
        f" WORLD_SIZE is {started}; start them with 'vcpo run', or with torchrun"
        f" {nodes}--nproc-per-node {processes} -m vcpo_learner, or change the field"
    )


def _set_threads(learner: Learner, environment: RankEnvironment) -> None:
    """Set the CPU threads of this rank; the ranks of one machine share its cores by default."""
    if learner.threads is not None:
        torch.set_num_threads(learner.threads)
    elif environment.size > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // learner.ranks_per_replica))
