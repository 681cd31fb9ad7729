"""A check, before the first step, that a model's routers can be told what to choose.

A router that chooses by another function than `torch.topk` would not be heard, and raise no error.
"""

from typing import Any

import torch
from torch import Tensor

from vcpo.service.lifecycle import StartError
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.router_replay import router_layout, routers_by_layer
from vcpo_learner.forward.token_batch import TokenBatch


@torch.no_grad()
def require_replayable(network: PolicyNetwork) -> None:
    """Check that each router of a model chooses what it is given.

    Raises: StartError, naming the field and the fix.
    """
    layout, name = router_layout(network.model), type(network.model).__name__
    field = "spec.algorithm.routerReplay: true, but"
    if layout is None:
        raise StartError(f"{field} {name} has no routers that are known; use false")
    device = next(network.model.parameters()).device
    # In the order of their numbers, for every token: no router would choose that.
    given = torch.arange(layout.num_choices, device=device).expand(1, 3, layout.num_layers, -1)
    chosen: list[bool] = []

    def look(router: Any, inputs: Any, outputs: Any) -> None:
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        chosen.append(any(_is_equal(each, given[0, :, 0]) for each in found))

    handles = [
        each.register_forward_hook(look) for each in routers_by_layer(network.model).values()
    ]
    try:
        network.score(_three_tokens(given), Wanted(tiles=False))
    finally:
        for handle in handles:
            handle.remove()
    if not all(chosen):
        raise StartError(f"{field} the routers of {name} cannot be told what to choose; use false")


def _is_equal(output: Any, given: Tensor) -> bool:
    is_choice = isinstance(output, Tensor) and not output.is_floating_point()
    return is_choice and torch.equal(output, given)


def _three_tokens(routes: Tensor) -> TokenBatch:
    input_ids = torch.arange(3, device=routes.device)[None]
    return TokenBatch(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        response_mask=input_ids > 0,
        expert_routes=routes,
    )
