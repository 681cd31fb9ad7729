"""Router replay: routers of the learner choose the experts that the rollout worker's routers chose.

A small difference of numerics may send a token to other experts, and its log-probability then moves
by far more than the numerics did. With the worker's choices the learner scores and trains the
experts that sampled the response. Their weights in the sum still follow from the learner's router,
so it gets its gradient.

Source: router replay, arXiv 2510.11370 (R3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vcpo.wire.packing import RouterLayout
from vcpo_learner.forward.token_batch import UNKNOWN
from vcpo_learner.per_sample_gradients.mixtures import OtherForward, is_router

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def router_layout(model: nn.Module) -> RouterLayout | None:
    """Return the layout of a transformers model's routes; None if it has no routers."""
    routers = routers_by_layer(model)
    if not routers:
        return None
    router: Any = next(iter(routers.values()))
    config: Any = model.config
    return RouterLayout(
        num_layers=config.get_text_config().num_hidden_layers,
        num_choices=router.top_k,
        num_experts=router.weight.shape[0],
    )


def routers_by_layer(model: nn.Module) -> dict[int, nn.Module]:
    """Return the routers of a model, by the number of their decoder layer."""
    return {
        int(found[1]): module
        for name, module in model.named_modules()
        if is_router(module) and (found := _LAYER.search(f"{name}."))
    }


@contextmanager
def replayed_routes(model: nn.Module, routes: Tensor | None) -> Iterator[None]:
    """Let the model's routers choose as given in the block, and when its layers run again.

    routes: [tokens of all rows, layers, choices] integers, UNKNOWN for tokens whose routers choose
        for themselves; None for all tokens.
    """
    if routes is None:
        yield
        return
    replay = RouterReplay(
        {each: routes[:, number].long() for number, each in routers_by_layer(model).items()}
    )
    token = _ACTIVE.set(replay)
    try:
        with replay:
            yield
    finally:
        _ACTIVE.reset(token)


def active_replay() -> RouterReplay | None:
    """Return the replay of the forward pass that runs now; None if there is none."""
    return _ACTIVE.get()


class RouterReplay(AbstractContextManager[None]):
    """A context, entered any number of times, in which routers choose as given."""

    def __init__(self, choices: Mapping[nn.Module, Tensor]) -> None:
        self._choices = choices
        self._replaced: list[OtherForward] = []

    def within(self, root: nn.Module) -> RouterReplay:
        own = set(root.modules())
        return RouterReplay({key: each for key, each in self._choices.items() if key in own})

    def __enter__(self) -> None:
        self._replaced = [
            OtherForward(router, _ReplayedForward(router.forward, choices))
            for router, choices in self._choices.items()
        ]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each in self._replaced:
            each.remove()
        self._replaced = []


class _ReplayedForward:
    """A router's forward with given choices in the place of its largest scores."""

    def __init__(self, forward: Callable[..., Any], choices: Tensor) -> None:
        self._forward = forward
        self._choices = choices

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with _GivenChoices(self._choices):
            return self._forward(*arguments, **keywords)


class _GivenChoices(TorchFunctionMode):
    """Returns given places, and the values there, in the place of the largest values'."""

    def __init__(self, choices: Tensor) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found.indices.shape != self._choices.shape:
            return found
        chosen = torch.where(self._choices == UNKNOWN, found.indices, self._choices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


_ACTIVE: ContextVar[RouterReplay | None] = ContextVar("router replay", default=None)
