"""A check, before the first step, that a model's gradient norms can be measured.

Exact norms depend on the model: every module that owns a trainable parameter must have trajectories
or tokens on the first axis of its inputs and outputs, or be a router or experts of a known form.
Three short trajectories show another module, and a comparison with autograd shows parameters that
are used outside their modules.
"""

import math
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn

from vcpo.service.lifecycle import StartError
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan
from vcpo_learner.forward.forward_pass import forward_pass, token_logprobs, weighted_logprobs
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import TokenBatch, token_batch
from vcpo_learner.forward.twin import make_twin
from vcpo_learner.per_sample_gradients.module_calls import past_chunk
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.ranks.sharding import whole

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
"""Relative, of a squared norm. Rounding in float32 is below 1e-6, so a small contribution that was
not measured shows; the second is for a model that computes in bfloat16."""
_HALF_TOKENS, _HALF_DRAWS = 48, 3
"""Of a trajectory, and beside short ones in the median: in bfloat16 few tokens round by 0.1."""
_NEGLIGIBLE = 1e-6
"""Share of the largest squared norm below which one is not compared."""


def require_measurable_norms(
    model: nn.Module,
    *,
    packs: bool,
    num_ranks: int = 1,
    is_half: bool = False,
) -> None:
    """Check that the norms of a model can be measured, on a twin of few layers if it has one.

    model: in evaluation mode; it does not change, but for its `.grad`, which is None afterwards.
    packs: whether trajectories share a row.
    num_ranks: that call this at the same time, if the model is sharded.
    is_half: whether it computes in bfloat16 here.
    """
    network = PolicyNetwork.of(model)
    twin = make_twin(network.model) if num_ranks == 1 else None
    if twin is not None:
        is_tiled, model = network.is_tiled, twin
        network = PolicyNetwork(twin)
        if is_tiled:
            network.compare_head()
    # Short trajectories are measured in another way, which has to run too.
    draws = [None, *range(_HALF_DRAWS if is_half else 0)]
    batches = [_batch(model, each, packs=packs) for each in draws]
    difference = median(_difference(model, network, each, num_ranks) for each in batches)
    if not difference <= (_HALF_TOLERANCE if is_half else _TOLERANCE):
        reason = f"squared, they differ from autograd's by a share of {difference:.2g}"
        raise _refusal(model, reason)


def _difference(
    model: nn.Module, network: PolicyNetwork, batch: TokenBatch, num_ranks: int
) -> float:
    """Return the largest share by which a squared norm differs from autograd's.

    Infinite if one is not a number. model: as a whole, which gathers what is sharded.
    """
    try:
        # Few tokens need no tiles, and the run's micro-batches may.
        ways = [_measured_norms(network, batch, tiles=False)]
        if network.is_tiled:
            ways.append(_measured_norms(network, batch, tiles=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's own code runs there
        raise _refusal(model, str(error)) from error
    expected = _autograd_norms(model, batch, num_ranks)
    # A query's gradient is 0 where attention sees one token only; rounding leaves a rest of it.
    scale = expected.clamp_min(max(_NEGLIGIBLE * float(expected.max()), 1e-30))
    errors = (torch.stack(ways) - expected).abs() / scale
    return float(errors.max().nan_to_num(math.inf))


def _refusal(model: nn.Module, reason: str) -> StartError:
    name = type(PolicyNetwork.of(model).model).__name__
    return StartError(
        f"spec.algorithm.baseline: gradient norms of {name} cannot be measured ({reason});"
        " use a method without norms such as 'grpo'"
    )


def _batch(model: nn.Module, draw: int | None, *, packs: bool) -> TokenBatch:
    """Three trajectories; they share a row if rows are packed.

    The first passes a chunk of the model's mixers. draw: of tokens over the whole vocabulary; with
    None the trajectories are as short as they may be.
    """
    device = next(model.parameters()).device
    longest, least = past_chunk(model) or 3, 1
    if draw is not None:
        longest, least = max(longest, _HALF_TOKENS), _HALF_TOKENS // 2
    tokens = _tokens(model, draw)
    lengths = enumerate((longest, least, least))
    trajectories = [_short(tokens, num_tokens, first) for first, num_tokens in lengths]
    return token_batch(trajectories, 0, device, packs=packs)


def _tokens(model: nn.Module, draw: int | None) -> list[int]:
    """Tokens that may stand in a trajectory.

    The embedding of a padding token is 0 in an untrained model. Normalized layer by layer, it has
    gradients beyond float32.
    """
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    padding = {each.padding_idx for each in embeddings}
    if draw is None or not embeddings:
        return [token for token in range(3 + len(padding)) if token not in padding][:3]
    stride = max(1, embeddings[0].num_embeddings // _HALF_TOKENS)
    spread = range(draw, embeddings[0].num_embeddings, stride)
    return [token for token in spread if token not in padding]


def _short(tokens: Sequence[int], num_tokens: int, first: int) -> Trajectory:
    chosen = [tokens[(first + at) % len(tokens)] for at in range(num_tokens + 1)]
    return Trajectory(
        trajectory_id=str(first),
        prompt_token_ids=(chosen[0],),
        response_token_ids=tuple(chosen[1:]),
        rollout_logprobs=(0.0,) * num_tokens,
        version_spans=(VersionSpan(policy_version=0, num_tokens=num_tokens),),
        reward=0.0,
        finish_reason=FinishReason.STOP,
    )


def _measured_norms(network: PolicyNetwork, batch: TokenBatch, *, tiles: bool) -> Tensor:
    weights = batch.response_mask.to(torch.float32)
    slots = Slots(network.model)
    passed = forward_pass(network, slots, batch, measures_norms=True, temperature=1.0, tiles=tiles)
    return passed.measure(weights).squared_norms


def _autograd_norms(model: nn.Module, batch: TokenBatch, num_ranks: int) -> Tensor:
    """Squared norms [batch], one forward and backward pass for each trajectory.

    A sharded model adds up the gradients of all ranks, which are all the same here.
    """
    weights = batch.response_mask.to(torch.float32) / num_ranks
    norms = []
    model.zero_grad()
    for index in range(len(weights)):
        objectives = weighted_logprobs(token_logprobs(model, batch, temperature=1.0), weights)
        torch.autograd.backward(objectives[index])
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        squares = [whole(each.double().square().sum()) for each in gradients]
        norms.append(torch.stack(squares).sum())
        model.zero_grad()
    return torch.stack(norms)
