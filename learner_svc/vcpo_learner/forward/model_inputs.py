"""What a model is called with for a batch of tokens, and where it finds each token."""

from typing import Any

import torch
from torch import Tensor

from vcpo_learner.forward.token_batch import TokenBatch


def model_inputs(batch: TokenBatch) -> dict[str, Any]:
    """Return the arguments of a model's call."""
    if batch.row is None:
        return {
            # Padding is on the right, where causal attention does not look: no mask is needed.
            "input_ids": batch.input_ids,
            "position_ids": _positions(batch),
            "use_cache": False,
        }
    return {
        "input_ids": batch.row.pack(batch.input_ids),
        **batch.row.arguments,
        "use_cache": False,
    }


def model_routes(batch: TokenBatch) -> Tensor | None:
    """Return the experts of each token of the model's input, [tokens of all rows, layers, choices].

    None if the routers choose for themselves.
    """
    if batch.expert_routes is None:
        return None
    routes = batch.expert_routes
    return (routes if batch.row is None else batch.row.pack(routes)).flatten(0, 1)


def predicting_places(batch: TokenBatch) -> Tensor:
    """Return the places of the tokens before the trained ones, [sampled tokens] int64.

    A model's output there is its prediction. Places count through all rows of its input.
    """
    return _places(batch)[batch.response_mask] - 1


def _places(batch: TokenBatch) -> Tensor:
    """Index [batch, width] of each token in the model's flattened input."""
    if batch.row is not None:
        return batch.row.places
    return torch.arange(batch.input_ids.numel(), device=batch.input_ids.device).view_as(
        batch.input_ids
    )


def _positions(batch: TokenBatch) -> Tensor:
    """Positions [batch, width], one row per trajectory.

    Without them a model may share one row of positions among all trajectories; the gradient of a
    learned position embedding could then not be attributed to one of them.
    """
    width = batch.input_ids.shape[1]
    return torch.arange(width, device=batch.input_ids.device).expand_as(batch.input_ids)
