"""The experts that the routers of a mixture of experts chose, token by token."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vcpo.wire.limits import MAX_ROUTE_BYTES
from vcpo.wire.packing import ExpertRoutes

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RouteRecorder:
    """Listens to the routers of a model. Owner: the thread that decodes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._newest: dict[int, Tensor] = {}
        routers = [
            (int(found[1]), module)
            for name, module in model.named_modules()
            # A router has a matrix of its own, and the number of experts of a token.
            if hasattr(module, "top_k")
            and isinstance(own := getattr(module, "weight", None), nn.Parameter)
            and own.ndim == 2
            and (found := _LAYER.search(f"{name}."))
        ]
        if not routers:
            raise ValueError(
                "spec.algorithm.routerReplay: true, but the routers of"
                f" {type(model).__name__} do not say what they choose; use false"
            )
        for layer, router in routers:
            router.register_forward_hook(self._listener(layer))

    def take(self, num_rows: int) -> Tensor:
        """Return the choices of the newest forward pass, [rows, tokens, layers, choices]."""
        some = next(iter(self._newest.values()))
        none = torch.zeros_like(some)
        layers = [self._newest.get(layer, none) for layer in range(self._num_layers)]
        self._newest = {}
        num_choices = some.shape[1]
        return torch.stack(layers, dim=1).view(num_rows, -1, self._num_layers, num_choices)

    def _listener(self, layer: int) -> Any:
        def listen(router: nn.Module, inputs: Any, outputs: Any) -> None:
            # Scores, weights, and the numbers of the experts.
            (choices,) = [each for each in outputs if not each.is_floating_point()]
            self._newest[layer] = choices.cpu()

        return listen


def packed_routes(tokens: Sequence[Tensor]) -> ExpertRoutes | None:
    """Return routes as they travel: of the first tokens, as many as fit a message; None of none.

    tokens: each [tokens, layers, choices], in order.
    """
    if not tokens:
        return None
    routes = torch.cat(list(tokens))
    is_wide = bool(routes.amax() > 255)
    numbers = routes.to(torch.uint16 if is_wide else torch.uint8)
    num_fitting = MAX_ROUTE_BYTES // (numbers[0].numel() * numbers.itemsize)
    return ExpertRoutes(
        experts=numbers[:num_fitting].numpy().tobytes(),
        num_layers=routes.shape[1],
        num_choices=routes.shape[2],
        is_wide=is_wide,
    )
