"""How far rounding alone moves the log-probabilities of a few tokens.

The learner scores them in its own precision and as an engine in the workers' precision would: with
parameters and activations in that number type. A copy of the parameters in bfloat16 is held
meanwhile, before the first backward pass, and so beside no gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, chain, zip_longest
from typing import Final

import torch
from torch import Tensor
from torch.func import functional_call

from vcpo.algo.ess.calibration import FRESH_BLOCK_TOKENS
from vcpo.algo.ess.unit import near_equal_blocks
from vcpo.algo.health.fresh_tokens import FreshTokens
from vcpo.algo.health.mismatch_limits import MISMATCH_LIMITS_NATS, MismatchClass, MismatchLimits
from vcpo.api import VCPORunSpec
from vcpo.api.workloads import Precision
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.forward.logprobs import token_logprobs
from vcpo_learner.forward.policy_network import NetworkOutput, PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import TokenBatch, batch_tokens
from vcpo_learner.update.fresh_tokens import token_blocks
from vcpo_learner.update.micro_batches import MicroBatchRunner

_LOGGER = logging.getLogger(__name__)
_NUM_TOKENS: Final = 1024
"""Tokens that are scored twice: a mean gap is known to about a twentieth."""
_NUM_TRAJECTORIES: Final = 16


def rounding_limits(
    runner: MicroBatchRunner, groups: Sequence[Sequence[Trajectory]], spec: VCPORunSpec
) -> MismatchLimits:
    """Return the limits that follow from rounding, as it is on the first trajectories of a batch.

    Where it cannot be measured, they are those of the number formats: with quantization or noise,
    with parameters that are cut over ranks or have 16 bits, and if the model does not compute in
    bfloat16.
    """
    formats = spec.mismatch_class
    assumed = MismatchLimits.of_gap(MISMATCH_LIMITS_NATS[formats])
    if formats is MismatchClass.QUANTIZED_OR_NOISY or runner.is_sharded or runner.is_short:
        return assumed
    precisions = {group.number_format for group in spec.rollouts}
    is_half = Precision.BFLOAT16 in precisions or formats is MismatchClass.EXACT
    try:
        blocks = _rounding_blocks(runner, _few(groups), is_half=is_half)
    except Exception as error:  # noqa: BLE001 - a model's own code runs there
        _LOGGER.warning("rounding cannot be measured, limits by number format apply: %s", error)
        return assumed
    return MismatchLimits.of_rounding(blocks, formats) or assumed


@torch.no_grad()
def _rounding_blocks(
    runner: MicroBatchRunner, trajectories: Sequence[Trajectory], *, is_half: bool
) -> list[FreshTokens]:
    """Return blocks of the log ratios between the learner's precision and the other one.

    is_half: whether the other one is bfloat16, else float32.
    """
    network = runner.network
    rounded = {
        name: each.detach().bfloat16() for name, each in network.named_parameters() if is_half
    }
    tokens = batch_tokens(trajectories, runner.device)
    blocks: list[FreshTokens] = []
    for step in runner.split(tokens, range(len(trajectories))):
        own = step.select_trained(runner.logprobs(step.batch))
        if is_half:
            found = _rounded_logprobs(network, rounded, step.batch, runner.temperature)
        else:
            found = token_logprobs(network, step.batch, temperature=runner.temperature)
        other = step.select_trained(found)
        sizes = [
            near_equal_blocks(trajectories[at].num_sampled_tokens, FRESH_BLOCK_TOKENS)
            for at in step.positions
        ]
        starts = [place for each in sizes for place in accumulate(each[:-1], initial=0)]
        ratios = own.double() - other.double()
        blocks += token_blocks(ratios, other, list(chain.from_iterable(sizes)), starts)
    return blocks


def _rounded_logprobs(
    network: PolicyNetwork, rounded: dict[str, Tensor], batch: TokenBatch, temperature: float
) -> Tensor:
    """As `token_logprobs`, of a network that holds these parameters."""
    output: NetworkOutput = functional_call(
        network, rounded, (batch, Wanted(temperature=temperature))
    )
    assert output.scores is not None
    return batch.place_trained(output.scores.logprobs)


def _few(groups: Sequence[Sequence[Trajectory]]) -> list[Trajectory]:
    """Return a few trajectories, of as many prompts as possible."""
    found: list[Trajectory] = []
    num_tokens = 0
    for each in chain.from_iterable(zip_longest(*groups)):
        if len(found) >= _NUM_TRAJECTORIES or num_tokens >= _NUM_TOKENS:
            break
        if each is not None:
            found.append(each)
            num_tokens += each.num_sampled_tokens
    return found
