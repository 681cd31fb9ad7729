"""A check, before the first step, that a trajectory's numbers do not depend on its company.

Company is what stands beside it in a micro-batch, or before it in a packed row. A dependence raises
no error, it makes every number slightly wrong. Models treat sequences on both sides of some lengths
differently: of their window, of a chunk of attention, of the sequences of their pretraining. The
check therefore tries both sides of each length that the configuration names, as far as it is cheap.
Rotary frequencies are tried at every length, because they need no forward pass. What the check
does not see is a mask that goes wrong at a window or chunk longer than `_MOST_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vcpo.algo.agreement import is_rounding
from vcpo.service.lifecycle import StartError
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import BatchTokens
from vcpo_learner.per_sample_gradients.mixtures import is_experts

_MOST_TOKENS: Final = {"cpu": 512, "cuda": 8192}
"""Most tokens that the trajectories of the check have together, by device."""
_SHORT: Final = (9, 5, 3)
"""Lengths that are always tried, the longest first."""
_PLACES: Final = 5
"""Places in the vocabulary from which tokens are taken where a model computes in 16 bits. A few
sequences, above all of control tokens, amplify its rounding to tenths of their numbers: .06 and .17
of them with a model of 135 M parameters, where most have .005. A mistake shows in most of them."""
_COMPARED: Final = 4
"""Last tokens of a trajectory that are compared; a length changes those beyond it."""
_NAMES_OF_LENGTHS: Final = ("window", "chunk", "max_position")
_CONTEXTS: Final = ("max_position_embeddings", "n_positions")


@torch.no_grad()
def require_kept_apart(
    network: PolicyNetwork, *, packs: bool = True, one_row: bool = False, is_half: bool = False
) -> None:
    """Check that a model's numbers of a trajectory are the same in any company.

    packs: whether rows hold several trajectories.
    one_row: whether its attention is told their ends.
    is_half: whether it computes in 16 bits here.
    Raises: StartError, naming the field, if one attends to another, its positions are wrong, or its
        frequencies follow the longest one.
    """
    named = _named_lengths(network.model)
    for length in named:
        _require_one_table(network.model, length)
    parameter = next(network.model.parameters())
    layout = _Layout(packs=packs, one_row=one_row, is_half=is_half)
    if packs and _leaks(network, layout):
        raise StartError(
            f"spec.batch.rowLayout: packed, but {type(network.model).__name__} lets trajectories in"
            " one row see each other; use padded"
        )
    most_tokens = _MOST_TOKENS.get(parameter.device.type, _MOST_TOKENS["cuda"])
    for lengths in _companies(named, most_tokens):
        _require_same_in_company(network, lengths, layout)


class _Layout(NamedTuple):
    packs: bool
    one_row: bool
    is_half: bool


def _require_same_in_company(
    network: PolicyNetwork, lengths: Sequence[int], layout: _Layout
) -> None:
    """Compare trajectories of some lengths, in the layout of a run, with each of them alone."""
    first, *others = _first_tokens(network.model, layout)
    found = _gaps(network, lengths, layout, first)
    if all(each.is_rounding for each in found):
        return
    places = [found, *(_gaps(network, lengths, layout, each) for each in others)]
    for length, gaps in zip(lengths, zip(*places, strict=True), strict=True):
        if not _is_most([not each.is_rounding for each in gaps]):
            continue
        field, cure = (
            ("batch.rowLayout", "padded") if layout.packs else ("model.name", "another model")
        )
        company = ", ".join(map(str, lengths))
        raise StartError(
            f"spec.{field}: {type(network.model).__name__} gives a trajectory of {length} tokens"
            f" other log-probabilities in a company of {company} tokens than alone (by"
            f" {median(each.nats for each in gaps):.2g} nats); use {cure}"
        )


class _Gap(NamedTuple):
    nats: float
    """Root mean square of the differences between a trajectory in company and alone."""
    is_rounding: bool


def _gaps(
    network: PolicyNetwork, lengths: Sequence[int], layout: _Layout, first_token: int
) -> list[_Gap]:
    """Return the gap of a trajectory of each length."""
    rows = [_token_ids(number, length, first_token) for number, length in enumerate(lengths)]
    gaps = []
    for row, found in zip(rows, _logprobs(network, rows, layout), strict=True):
        (alone,) = _logprobs(network, [row])
        nats, size = (_root_mean_square(each[-_COMPARED:]) for each in (found - alone, alone))
        gaps.append(_Gap(nats, is_rounding(nats, size, is_half=layout.is_half)))
    return gaps


def _first_tokens(model: nn.Module, layout: _Layout) -> list[int]:
    """The least token of each place to try; the second and later ones settle a doubt."""
    known = _known(model)
    if known is None or not layout.is_half:
        return [1]
    vocabulary = known.config.get_text_config(decoder=True).vocab_size
    return [1 + place * (vocabulary - 5) // _PLACES for place in range(_PLACES)]


def _is_most(found: Sequence[bool]) -> bool:
    """Whether more than half of the places show it."""
    return 2 * sum(found) > len(found)


def _leaks(network: PolicyNetwork, layout: _Layout) -> bool:
    """Whether tokens of one trajectory change those of another behind them in the row."""
    first, *others = _first_tokens(network.model, layout)
    if not _leaks_at(network, layout, first):
        return False
    return _is_most([True, *(_leaks_at(network, layout, each) for each in others)])


def _leaks_at(network: PolicyNetwork, layout: _Layout, first_token: int) -> bool:
    """Whether they do with the four tokens from the first one on."""
    a, b, c, d = range(first_token, first_token + 4)
    longest, own = _token_ids(0, _SHORT[0], first_token), [c, d, c]
    first, second = (
        _logprobs(network, [longest, other, own], layout)[-1] for other in ([a, b, b], [b, a, a])
    )
    if any(is_experts(each) for each in network.modules()):
        # Tokens of other trajectories change how many an expert computes at once, and so rounding.
        gap, size = _root_mean_square(first - second), _root_mean_square(second)
        return not is_rounding(gap, size, is_half=layout.is_half)
    # A masked token has no influence at all: not even the last digit may differ.
    return not torch.equal(first, second)


def _require_one_table(model: nn.Module, length: int) -> None:
    """Check that the rotary frequencies of first positions are those of a pass of any length."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        table = next((each for name, each in buffers.items() if name.endswith("inv_freq")), None)
        if table is None:
            continue
        kinds = getattr(module, "rope_type", None)
        for layer_type in kinds if isinstance(kinds, dict) else [None]:
            options = {} if layer_type is None else {"layer_type": layer_type}
            with suppress(TypeError):  # a family's own, which is called in another way
                short, long = (
                    module(table.new_zeros(1), _positions(last, table), **options)
                    for last in (2, length)
                )
                if any(map(_differ, short, long)):
                    raise StartError(
                        f"spec.model.name: the rotary frequencies of {type(model).__name__} change"
                        f" when a pass is {length} tokens long, so a trajectory's numbers depend on"
                        " its company; use another model"
                    )


def _positions(last: int, like: Tensor) -> Tensor:
    return torch.tensor([[0, 1, last]], device=like.device)


def _differ(short: Tensor, long: Tensor) -> bool:
    return not torch.equal(short[..., :2, :], long[..., :2, :])


def _named_lengths(model: nn.Module) -> list[int]:
    """The lengths in tokens that a model's configuration names, in ascending order.

    Lengths of its context and beyond are left out: no trajectory has more tokens.
    """
    known = _known(model)
    if known is None:
        return []
    config = known.config.get_text_config(decoder=True).to_dict()
    context = min((config[key] for key in _CONTEXTS if config.get(key)), default=1)
    # The last position of the context is the one that a stretched table is made for.
    return sorted({each for each in _lengths(config) if 1 < each < context} | {context - 1})


def _known(model: nn.Module) -> PreTrainedModel | None:
    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)


def _lengths(config: Mapping[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif type(value) is int and any(word in key for word in _NAMES_OF_LENGTHS):
            yield value


def _companies(named: Sequence[int], most_tokens: int) -> Iterator[Sequence[int]]:
    """Lengths of trajectories to put together: short ones, and both sides of each named length.

    In a packed row the last of them stands behind the second and lies across that length.
    """
    yield _SHORT
    for length in named[:-1]:
        lengths = (length + _COMPARED, max(2, length - 1), _COMPARED + 1)
        most_tokens -= sum(lengths)
        if most_tokens < 0 or lengths[0] > named[-1]:
            return
        yield lengths


def _token_ids(number: int, length: int, first: int = 1) -> list[int]:
    """Four tokens from the first one on, each another one than that before it.

    From 1 on they are tokens that every vocabulary has.
    """
    return [first + (number + at + at // 4) % 4 for at in range(length)]


def _logprobs(
    network: PolicyNetwork,
    trajectories: Sequence[Sequence[int]],
    layout: _Layout | None = None,
) -> list[Tensor]:
    """Log-probabilities of all but the first token of each trajectory; None is a row for each."""
    device = next(network.model.parameters()).device
    lengths = [len(each) for each in trajectories]
    tokens = BatchTokens(
        num_tokens=lengths,
        token_ids=[torch.tensor(each, device=device) for each in trajectories],
        is_trained=[torch.arange(length, device=device) > 0 for length in lengths],
    )
    batch = tokens.micro_batch(
        range(len(lengths)),
        0,
        packs=layout is not None and layout.packs,
        one_row=layout is not None and layout.one_row,
    )
    logprobs = network.score(batch, Wanted()).logprobs
    return list(torch.split(logprobs, [length - 1 for length in lengths]))


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
