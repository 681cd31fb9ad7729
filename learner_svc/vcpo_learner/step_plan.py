"""`python -m vcpo_learner.step_plan < run.yaml`: what a step of a run takes of GPUs, by count.

The model is built from its configuration, without memory. The GPUs are this machine's; on one that
has none, cards of 80 GB: one for the whole run unless its file asks for more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, cast

from torch import nn
from transformers import PreTrainedModel

from vcpo.api import VCPORunSpec
from vcpo.api.learner import ActivationCheckpointing
from vcpo.api.workloads import Precision
from vcpo.local.models import worker_bytes
from vcpo.local.processes.gpus import find_gpus, gpu_bytes, gpu_name, plan_gpus
from vcpo_learner.estimator.own_functions import wants_norms
from vcpo_learner.estimator.trial import main
from vcpo_learner.forward.fused_layers import fuse_layers
from vcpo_learner.model.loading import choose_trained, hold_base_short
from vcpo_learner.model.skeleton import build_skeleton
from vcpo_learner.schedule.token_budget import (
    MemoryBudget,
    MemoryUse,
    ModelSize,
    check_room,
    group_bytes,
    planned,
    state_bytes,
    token_bytes,
)

_GIB: Final = 1 << 30
_ASSUMED_BYTES: Final = 81_559 << 20
"""Memory of a card that is sold with 80 GB."""
_ASSUMED_CARD: Final = "H100"
_CONTEXT_BYTES: Final = 600 << 20
"""What CUDA and its kernels take of a GPU beside tensors, about."""
_TERAFLOPS: Final = {"A100": 312, "H100": 989, "H200": 989, "B200": 2_250}
"""Products in bfloat16 a second without sparsity, by NVIDIA's data sheets."""
_REACHED: Final = 0.226
"""Share of them that steps of 1.5 B reached on an H200; a product that is repeated counts again."""


def plan_lines(spec: VCPORunSpec) -> Iterator[str]:
    """Yield what the learner has in one of its GPUs, its micro-steps, and the seconds of a step."""
    learner, model, gpus = spec.learner, _skeleton(spec), find_gpus()
    fuse_layers(model, is_half=False)
    size = ModelSize.of(model)
    assert size is not None  # it is a model of transformers
    held = (gpu_bytes(gpus[0]) if gpus else None) or _ASSUMED_BYTES
    share = _learner_share(spec, size.num_parameters, held, num_gpus=len(gpus))
    use = MemoryUse.of(
        spec,
        num_shards=learner.fsdp_size or learner.ranks,
        measures_norms=wants_norms(spec.algorithm.loss_config.baseline),
    )
    weights = sum(each.nbytes for each in model.parameters()) // use.num_shards
    free = max(0, min(held - _CONTEXT_BYTES, int(share * held)) - weights)
    check_room(free, size, use)
    longest = spec.context_tokens or spec.sampling.max_new_tokens
    budget = planned(free, size, use, learner.activation_checkpointing, longest)
    budget = replace(budget, tokens=spec.batch.tokens_per_micro_batch or budget.tokens)
    repeats = budget.activations is ActivationCheckpointing.LAYERS
    use = replace(use, checkpoints_layers=repeats)
    parts = {"weights": weights, **memory_parts(size, use, budget)}
    listed = ", ".join(f"{name} {each / _GIB:.1f}" for name, each in parts.items())
    ranks = "" if learner.ranks == 1 else f" on each of {learner.ranks}"
    where = f"{held / _GIB:.1f} GiB{'' if gpus else ' (none is here)'}{ranks}"
    used = f"{sum(parts.values()) / _GIB:.1f} of {where}, learner's share {share:.2f}"
    yield f"GPU       {used}: {listed}"
    kept = "computed again" if repeats else "kept"
    most = f"a trajectory has {longest:,} at most"
    yield f"tokens    {budget.tokens:,} in a micro-step, {most}; activations {kept}"
    card = gpu_name(gpus[0]) if gpus else _ASSUMED_CARD
    rate = next((each for name, each in _TERAFLOPS.items() if name in card), None)
    if rate is not None and learner.number_format is Precision.BFLOAT16:
        shared = "; workers take theirs of the same GPU" if share < 1 else ""
        yield f"seconds   {_seconds(spec, token_flops(model, repeats=repeats), rate)}{shared}"


def _seconds(spec: VCPORunSpec, flops: float, rate: int) -> str:
    """Return how long a step takes of responses that are all cut; flops: of a token."""
    responses, tokens = spec.batch.trajectories, spec.sampling.max_new_tokens
    seconds = responses * tokens * flops / (spec.learner.ranks * _REACHED * rate * 1e12)
    how = f"at {_REACHED} of {rate} TFLOP/s, as 1.5 B on an H200"
    return f"{seconds:.3g} for {responses} responses of {tokens:,} tokens, {how}"


def memory_parts(size: ModelSize, use: MemoryUse, budget: MemoryBudget) -> Mapping[str, float]:
    """Return the bytes of a rank at its fullest, beside the parameters, by what they hold."""
    trained = size.num_trained / use.num_shards
    state = {
        "gradients": trained * 4 * (1 + use.measures_norms),
        "moments": trained * 8,
        "published": trained * use.published_bytes,
    }
    state["copies and kernels"] = state_bytes(size, use) - sum(state.values())
    state["gradients"] += (budget.groups - 1) * group_bytes(size, use)
    return {**state, "activations": budget.tokens * token_bytes(size, use)}


def token_flops(model: PreTrainedModel, *, repeats: bool) -> float:
    """Return the operations of a step on a token, two for each use of a parameter.

    The forward pass uses it once, twice if it is repeated, and the backward pass as often as a
    gradient is wanted, of the input and of the parameter. A row that is looked up is no product. Of
    the experts of a layer those count that a token is sent to.
    """
    active = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call] # theirs
    table = cast("nn.Embedding", model.get_input_embeddings()).weight
    is_head = head is not None and table is head.weight
    flops = 0.0
    for each in model.parameters():
        if is_head or each is not table:
            share = active / each.shape[0] if active and each.ndim == 3 else 1.0
            flops += 2 * share * each.numel() * (2 + each.requires_grad + repeats)
    return flops


def _skeleton(spec: VCPORunSpec) -> PreTrainedModel:
    """Return the model as the ranks hold it together, its parameters on `meta`."""
    given = spec.model
    model = build_skeleton(given.name, given.revision, trust_remote_code=given.trust_remote_code)
    choose_trained(model, given.lora)
    if spec.learner.ranks == 1:
        hold_base_short(model, spec.learner.number_format)
    return model


def _learner_share(spec: VCPORunSpec, parameters: int, held: int, *, num_gpus: int) -> float:
    """Return the learner's share of each of its GPUs, of `held` bytes; num_gpus: of the machine."""
    asked = spec.learner.gpus_per_replica, *(group.gpus for group in spec.rollouts)
    if spec.learner.ranks > 1 or num_gpus > 1 or (not num_gpus and any(asked)):
        return 1.0
    needed = worker_bytes(spec, parameters)
    plan = plan_gpus(
        ["0"],
        max_workers=sum(group.max_replicas for group in spec.rollouts),
        worker_ratio=1.0 if needed is None else needed / held,
    )
    assert plan.learner is not None  # it has the GPU
    return plan.learner.memory_ratio or 1.0


if __name__ == "__main__":
    sys.exit(main(plan_lines))
