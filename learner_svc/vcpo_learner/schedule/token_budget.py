"""How many tokens a micro-batch may have: what the free memory of a GPU holds.

Bytes that a step needs at its fullest, with b bytes per activation (2 in bfloat16, 4 in float32), P
trained parameters on a rank, L layers, hidden size H and inner size I of a layer's feed-forward:

    state         P (4 + 8 + 4 G)   gradient, moments of AdamW, sums of G open groups, with norms;
                                    sharded, each also has the sum of the largest matrices whole
                  4 P_all           the first policy, for methods that are pulled back to it
    published     w P               what workers have, w bytes per number in their type
    copies        b P               of what is trained, in the number type of the products; with
                                    checkpoints or sharded (and their sums): two layers and the ends
    workspace     2 GiB             tiles of logits, chunks of per-trajectory gradients, kernels
    layer         4 I b + 64 H      a token's activations in one layer that its backward pass reads:
                                    gate, up, their product and activation; the rest is norms,
                                    residuals in float32, queries, keys, values, mostly of size H;
                                    3 I b with a fused gate, 40 H with fused norms and rotations
                                    a mixer adds, in float32, 80 for each channel that it convolves,
                                    and 16 for each of its decays and each token of a chunk
    gradients     2 I b + 5 H b     a token's gradients at the outputs of a layer's matrices, which
                                    norms of short sequences keep to the end, if measured
    head          20 H              states before the head, their gradient, expectations of tiles

    kept per token          L (layer + gradients) + head
    with checkpoints        L (4 H) + 2 (layer + gradients) + head       one layer at a time

The coefficients of `layer` are upper bounds over families, as a test measures them. Of the free
memory a tenth is left for fragmentation.
"""

import logging
from dataclasses import dataclass, replace
from typing import Final, Self

from torch import nn
from transformers import PretrainedConfig

from vcpo.algo.advantage import BaselineScope
from vcpo.algo.methods import KLPenalty
from vcpo.api import VCPORunSpec
from vcpo.api.learner import ActivationCheckpointing, OptimizerName
from vcpo.api.workloads import Precision
from vcpo.service.lifecycle import StartError
from vcpo_learner.device import free_bytes
from vcpo_learner.forward.attention import transformers_model
from vcpo_learner.forward.fused_layers import fused_parts
from vcpo_learner.per_sample_gradients.module_calls import is_depthwise
from vcpo_learner.ranks.ranks import Ranks

_LOGGER = logging.getLogger(__name__)

_MIXER_HEADS: Final = [
    "linear_num_value_heads",
    "linear_num_heads",
    "mamba_n_heads",
    "mamba_num_heads",
]
_GIB: Final = 1 << 30
_WORKSPACE_BYTES: Final = 2 * _GIB
_USABLE_SHARE: Final = 0.9
_SHARE_FOR_GROUPS: Final = 0.25
"""Share of what the state leaves that sums of more groups than one may take."""
_SUM_BYTES: Final = 4
"""Bytes that one parameter takes in the sum of a group's gradients."""
_MANY_TOKENS: Final = 8192
"""Tokens of a micro-step from which on the GPU decides how long it takes, and not the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The numbers of a model that its memory depends on."""

    num_parameters: int
    """All of them, over all shards."""
    num_trained: int
    num_layers: int
    hidden: int
    """The larger one of hidden state and all queries of a token."""
    inner: int
    """Inner numbers of a token in a feed-forward layer, over its active experts."""
    vocabulary: int
    inner_copies: int = 4
    """Of a token's inner numbers in a layer: gate, up, their product, and the activation."""
    hidden_bytes: int = 64
    """Of one of a token's hidden numbers in a layer."""
    mixer_bytes: int = 0
    """Of a token's activations in a mixer, without kernels."""

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return the numbers of a model of transformers, also inside another module, else None."""
        policy = transformers_model(model)
        if policy is None:
            return None
        config = policy.config.get_text_config()
        hidden = config.hidden_size
        inner = _largest(config, "intermediate_size") or 4 * hidden
        experts = _largest(config, "num_experts_per_tok")
        expert = _largest(config, "moe_intermediate_size") or inner
        queries = _largest(config, "num_attention_heads") * _largest(config, "head_dim")
        parameters = list(policy.parameters())
        has_fused_gates, has_fused_norms = fused_parts(policy)
        channels = [each.in_channels for each in policy.modules() if is_depthwise(each)]
        return cls(
            num_parameters=sum(each.numel() for each in parameters),
            num_trained=sum(each.numel() for each in parameters if each.requires_grad),
            num_layers=config.num_hidden_layers,
            hidden=max(hidden, queries),
            inner=max(inner, experts * expert),
            vocabulary=config.vocab_size,
            inner_copies=3 if has_fused_gates else 4,
            hidden_bytes=40 if has_fused_norms else 64,
            # Queries, keys and values of a token have a channel each in the convolution.
            mixer_bytes=80 * max(channels, default=0) + 16 * _decays_of_chunk(config),
        )


def _decays_of_chunk(config: PretrainedConfig) -> int:
    """Decays of a token, of heads or of their channels, times the tokens of a chunk."""
    heads = max(_largest(config, name) for name in _MIXER_HEADS)
    chunk = max(_largest(config, name) for name in ("mamba_chunk_size", "chunk_size"))
    return heads * (_largest(config, "linear_head_dim") or 1) * (chunk or 64)


def _largest(config: PretrainedConfig, name: str) -> int:
    """Return the largest number of any layer, or 0: layers may differ, or have none.

    A few families have a list of numbers, others a configuration for each layer.
    """
    layers = getattr(config, "per_layer_config", None) or [config]
    values = [getattr(layer, name, None) or 0 for layer in layers]
    return max(max(each) if isinstance(each, list | tuple) else each for each in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How a run uses memory."""

    activation_bytes: int
    """Bytes of one number of the activations, 2 or 4."""
    checkpoints_layers: bool
    num_shards: int
    """Ranks that hold one copy of the parameters together."""
    published_bytes: int = 0
    """Of one parameter in a published version, which the device keeps: 2 or 4."""
    has_reference: bool = False
    """Whether the policy that training began with is kept as well, in float32."""
    least_moment_bytes: int = 8
    """Of one trained parameter: AdamW's two moments, or Muon's one."""
    measures_norms: bool = True
    """Whether sums of groups are kept beside the gradient."""
    is_one_group: bool = False
    """Whether all trajectories of a batch share a baseline, and one sum."""

    @classmethod
    def of(cls, spec: VCPORunSpec, *, num_shards: int, measures_norms: bool) -> Self:
        """Return how a run uses memory that keeps its activations."""
        config = spec.algorithm.loss_config
        return cls(
            activation_bytes=2 if spec.learner.number_format is Precision.BFLOAT16 else 4,
            checkpoints_layers=False,
            num_shards=num_shards,
            published_bytes=2 if spec.published_precision is Precision.BFLOAT16 else 4,
            has_reference=config.kl_penalty is KLPenalty.REFERENCE,
            least_moment_bytes=4 if spec.optimizer.name is OptimizerName.MUON else 8,
            measures_norms=measures_norms,
            is_one_group=config.baseline_scope is BaselineScope.BATCH,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What one rank runs at a time, at most."""

    tokens: int
    """Tokens of a micro-batch, at least 1."""
    groups: int
    """Groups whose sums are in memory, at least 1."""
    activations: ActivationCheckpointing = ActivationCheckpointing.NONE
    """`none` or `layers`."""


def memory_budget(free_bytes: int, size: ModelSize, use: MemoryUse) -> MemoryBudget:
    """Return what a micro-batch may hold, from the memory that is free beside the parameters.

    free_bytes: before the first step, when there are neither gradients nor moments.
    """
    left = max(0, int(free_bytes * _USABLE_SHARE) - state_bytes(size, use))
    for_groups = 0 if use.is_one_group else int(left * _SHARE_FOR_GROUPS)
    return MemoryBudget(
        tokens=max(1, (left - for_groups) // token_bytes(size, use)),
        groups=1 + for_groups // max(group_bytes(size, use), 1),
        activations=ActivationCheckpointing("layers" if use.checkpoints_layers else "none"),
    )


def planned(
    free_bytes: int, size: ModelSize, use: MemoryUse, setting: ActivationCheckpointing, longest: int
) -> MemoryBudget:
    """Return what a micro-batch may hold; `auto` computes activations again only to hold enough.

    use: its `checkpoints_layers` is not read. longest: tokens of the longest trajectory.
    """
    kept, again = (
        memory_budget(free_bytes, size, replace(use, checkpoints_layers=each))
        for each in (False, True)
    )
    is_enough = kept.tokens >= max(_MANY_TOKENS, longest)
    if setting is ActivationCheckpointing.LAYERS:
        return again
    return kept if is_enough or setting is ActivationCheckpointing.NONE else again


def check_room(free_bytes: int, size: ModelSize, use: MemoryUse) -> None:
    """Check that the memory that is free beside the parameters holds what every step needs."""
    needed = size.num_trained * (4 + use.least_moment_bytes + use.published_bytes)
    needed = (needed + 4 * size.num_parameters * use.has_reference) // use.num_shards
    if needed > free_bytes:
        raise StartError(
            f"spec.model.name: has {size.num_trained / 1e9:.2f} billion trained parameters, whose"
            f" gradients, moments and published version take {needed / _GIB:.1f} GiB of a GPU of"
            f" which the parameters leave {free_bytes / _GIB:.1f} GiB to the learner; train"
            " adapters (spec.model.lora), shard the model (spec.learner.gpusPerReplica), or use a"
            " GPU with more memory"
        )


def group_bytes(size: ModelSize, use: MemoryUse) -> int:
    """Return the bytes that the sums of one more group take."""
    of_shard = size.num_trained * _SUM_BYTES // use.num_shards
    if use.num_shards == 1:
        return of_shard
    # Whole until they are reduced: one layer's matrix, and the head's if the embedding shares it;
    # and the rows of a rank, of which they become the sums.
    whole = (size.vocabulary + size.inner) * size.hidden * _SUM_BYTES
    return of_shard + whole + whole // use.num_shards


def state_bytes(size: ModelSize, use: MemoryUse) -> int:
    """Return the bytes beside the parameters that do not depend on tokens, with one open group."""
    of_parameter = 4 + 8 + _SUM_BYTES * use.measures_norms + use.published_bytes
    of_shard = size.num_trained * of_parameter // use.num_shards
    if use.has_reference:
        of_shard += 4 * size.num_parameters // use.num_shards
    ends = 2 * size.vocabulary * size.hidden
    layers = 2 * max(size.num_parameters - ends, 0) // size.num_layers
    if use.num_shards > 1:
        # Gathered numbers, and two float32 sums on their way to the shards.
        gathered = (ends + layers) * (use.activation_bytes + 4 + _SUM_BYTES)
    elif use.activation_bytes == 4:
        gathered = 0
    else:
        in_use = ends + layers if use.checkpoints_layers else size.num_trained
        gathered = min(in_use, size.num_trained) * use.activation_bytes
    return of_shard + gathered + _WORKSPACE_BYTES


def token_bytes(size: ModelSize, use: MemoryUse) -> int:
    """Return the bytes that one more token of a micro-batch takes."""
    layer = layer_bytes(size, use.activation_bytes)
    gradients = (2 * size.inner + 5 * size.hidden) * use.activation_bytes * use.measures_norms
    head = 20 * size.hidden
    if use.checkpoints_layers:
        return size.num_layers * 4 * size.hidden + 2 * (layer + gradients) + head
    return size.num_layers * (layer + gradients) + head


def layer_bytes(size: ModelSize, activation_bytes: int) -> int:
    """Return the bytes of a token's activations in one layer that its backward pass reads."""
    of_inner = size.inner_copies * size.inner * activation_bytes
    return of_inner + size.hidden_bytes * size.hidden + size.mixer_bytes


def budget_on_ranks(
    model: nn.Module, spec: VCPORunSpec, ranks: Ranks, *, measures_norms: bool
) -> MemoryBudget | None:
    """Return what the rank with the least free memory holds; None on a CPU. A collective call.

    model: on its device, before the first step.
    """
    free, size = free_bytes(ranks.device), ModelSize.of(model)
    if free is None or size is None:
        return None
    use = MemoryUse.of(spec, num_shards=ranks.num_shards, measures_norms=measures_norms)
    free = ranks.least(free)  # all ranks refuse, or none: one alone would leave the others waiting
    check_room(free, size, use)
    longest = spec.context_tokens or spec.sampling.max_new_tokens
    budget = planned(free, size, use, spec.learner.activation_checkpointing, longest)
    tokens = spec.batch.tokens_per_micro_batch or budget.tokens
    _LOGGER.log(
        logging.INFO if tokens >= longest else logging.WARNING,
        "micro-batches of at most %d tokens (a trajectory: %d), %d groups, activations %s: %.1f GiB"
        " are free",
        *(tokens, longest, budget.groups, budget.activations, free / _GIB),
    )
    return budget
