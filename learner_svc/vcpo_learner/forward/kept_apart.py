"""A check, before the first step, that a model keeps the trajectories of a packed row apart.

A leak raises no error, it makes every number slightly wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vcpo.service.lifecycle import StartError
from vcpo_learner.forward.packed_rows import lay_out, pack_one_row
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import TokenBatch
from vcpo_learner.per_sample_gradients.mixtures import is_experts

_TOLERANCE = 1e-3
"""Of the difference of log-probabilities in two rows, over the largest; rounding is a hundredth."""


@torch.no_grad()
def require_kept_apart(network: PolicyNetwork, *, one_row: bool = False) -> None:
    """Check that a model keeps trajectories of one row apart.

    one_row: whether its attention is told their ends.
    Raises: StartError, naming the field, if one attends to the other or its positions are wrong.
    """
    own = [3, 4, 3]
    alone = _last_logprobs(network, [own])
    first, second = (
        _last_logprobs(network, [other, own], packs=True, one_row=one_row)
        for other in ([1, 2, 2], [2, 1, 1])
    )
    rounding = _TOLERANCE * float(alone.abs().max())
    is_off = float((first - alone).abs().max()) > rounding
    if any(is_experts(each) for each in network.modules()):
        # Tokens of other trajectories change how many an expert computes at once, and so rounding.
        is_leak = float((first - second).abs().max()) > rounding
    else:
        # A masked token has no influence at all: not even the last digit may differ.
        is_leak = not torch.equal(first, second)
    if is_off or is_leak:
        raise StartError(
            f"spec.batch.rowLayout: packed, but {type(network.model).__name__} lets trajectories in"
            " one row see each other; use padded"
        )


def _last_logprobs(
    network: PolicyNetwork,
    trajectories: Sequence[Sequence[int]],
    *,
    packs: bool = False,
    one_row: bool = False,
) -> Tensor:
    """Log-probabilities of all but the first token of the last trajectory, one of equal ones."""
    device = next(network.model.parameters()).device
    input_ids = torch.tensor(trajectories, device=device)
    is_trained = torch.ones_like(input_ids, dtype=torch.bool)
    is_trained[:, 0] = False
    batch = TokenBatch(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), response_mask=is_trained
    )
    if packs:
        lengths = [len(each) for each in trajectories]
        row = [range(len(lengths))]
        packed = lay_out(lengths, row, sum(lengths), device)
        batch = replace(batch, rows=pack_one_row(lengths, device) if one_row else packed)
    logprobs = network.score(batch, Wanted()).logprobs
    return logprobs[-(len(trajectories[-1]) - 1) :]
