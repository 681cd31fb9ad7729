"""A check, before the first step, that a trajectory's numbers do not depend on its company.

Company is what stands beside it in a micro-batch, or before it in a packed row. A dependence raises
no error, it makes every number slightly wrong. Short trajectories are compared with each of them
alone, and rotary frequencies at both ends of the context. The check does not see a mask that goes
wrong at a longer window or chunk: `docs/models.md` lists the families that were tried there.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor, nn

from vcpo.algo.agreement import is_rounding
from vcpo.service.lifecycle import StartError
from vcpo_learner.forward.attention import transformers_model
from vcpo_learner.forward.policy_network import PolicyNetwork, Wanted
from vcpo_learner.forward.token_batch import BatchTokens
from vcpo_learner.per_sample_gradients.mixtures import is_experts
from vcpo_learner.per_sample_gradients.module_calls import past_chunk

_LENGTHS: Final = (9, 5, 3)
"""Tokens of the trajectories, the longest first. A model with mixers has one more before them."""
_COMPARED: Final = 4
"""Last tokens of a trajectory that are compared."""
_CONTEXTS: Final = ("max_position_embeddings", "n_positions")


@torch.no_grad()
def require_kept_apart(network: PolicyNetwork, *, packs: bool, is_half: bool = False) -> None:
    """Check that a model's numbers of a trajectory are the same in any company.

    packs: whether a row holds several trajectories; its attention is told their ends.
    is_half: whether it computes in 16 bits here.

    Raises: StartError, naming the field, if one attends to another, its positions are wrong, or its
        frequencies follow the longest one.
    """
    name = type(network.model).__name__
    _require_one_table(network.model)
    first = _first_token(network.model)
    chunk = past_chunk(network.model)
    lengths = (chunk, *_LENGTHS) if chunk else _LENGTHS
    if packs and _leaks(network, first, lengths[0], is_half=is_half):
        raise StartError(
            f"spec.batch.rowLayout: packed, but {name} lets trajectories in one row see each other;"
            " use padded"
        )
    rows = [_token_ids(number, length, first) for number, length in enumerate(lengths)]
    for row, found in zip(rows, _logprobs(network, rows, packs=packs), strict=True):
        (alone,) = _logprobs(network, [row])
        nats, size = (_root_mean_square(each[-_COMPARED:]) for each in (found - alone, alone))
        if not is_rounding(nats, size, is_half=is_half):
            field, fix = ("batch.rowLayout", "padded") if packs else ("model.name", "another model")
            raise StartError(
                f"spec.{field}: {name} gives a trajectory of {len(row)} tokens other"
                f" log-probabilities in a batch than alone (by {nats:.2g} nats); use {fix}"
            )


def _leaks(network: PolicyNetwork, first: int, length: int, *, is_half: bool) -> bool:
    """Whether tokens of one trajectory change those of another behind them in the row.

    length: of the first trajectory in the row.
    """
    a, b, c, d = range(first, first + 4)
    longest, own = _token_ids(0, length, first), [c, d, c]
    one, other = (
        _logprobs(network, [longest, before, own], packs=True)[-1]
        for before in ([a, b, b], [b, a, a])
    )
    if any(is_experts(each) for each in network.modules()):
        # Tokens of other trajectories change how many an expert computes at once, and so rounding.
        gap, size = _root_mean_square(one - other), _root_mean_square(other)
        return not is_rounding(gap, size, is_half=is_half)
    # A masked token has no influence at all: not even the last digit may differ.
    return not torch.equal(one, other)


def _require_one_table(model: nn.Module) -> None:
    """Check that the rotary frequencies of first positions are those of a pass of any length."""
    last = _context_tokens(model) - 1
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        table = next((each for name, each in buffers.items() if name.endswith("inv_freq")), None)
        if table is None:
            continue
        kinds = getattr(module, "rope_type", None)
        for layer_type in kinds if isinstance(kinds, dict) else [None]:
            options = {} if layer_type is None else {"layer_type": layer_type}
            with suppress(TypeError):  # a family's own, which is called in another way
                ends = (torch.tensor([[0, 1, end]], device=table.device) for end in (2, last))
                tables = (module(table.new_zeros(1), each, **options) for each in ends)
                pairs = zip(*tables, strict=True)
                if not all(torch.equal(*(each[..., :2, :] for each in pair)) for pair in pairs):
                    raise StartError(
                        f"spec.model.name: the rotary frequencies of {type(model).__name__} change"
                        f" when a pass is {last} tokens long, so a trajectory's numbers depend on"
                        " its company; use another model"
                    )


def _context_tokens(model: nn.Module) -> int:
    known = transformers_model(model)
    config = {} if known is None else known.config.get_text_config(decoder=True).to_dict()
    return min((config[key] for key in _CONTEXTS if config.get(key)), default=4)


def _first_token(model: nn.Module) -> int:
    """The first of four tokens in the middle of the vocabulary.

    Control tokens at its beginning amplify the rounding of 16 bits: to .17 of their numbers in a
    model of 135 M parameters, where others have .005.
    """
    known = transformers_model(model)
    if known is None:
        return 1
    vocabulary: int = known.config.get_text_config(decoder=True).vocab_size
    return max(1, vocabulary // 2)


def _token_ids(number: int, length: int, first: int) -> list[int]:
    return [first + (number + at + at // 4) % 4 for at in range(length)]


def _logprobs(
    network: PolicyNetwork, trajectories: Sequence[Sequence[int]], *, packs: bool = False
) -> list[Tensor]:
    """Log-probabilities of all but the first token of each trajectory."""
    device = next(network.model.parameters()).device
    lengths = [len(each) for each in trajectories]
    tokens = BatchTokens(
        num_tokens=lengths,
        token_ids={at: torch.tensor(each, device=device) for at, each in enumerate(trajectories)},
        is_trained={
            at: torch.arange(length, device=device) > 0 for at, length in enumerate(lengths)
        },
    )
    batch = tokens.micro_batch(range(len(lengths)), 0, packs=packs)
    logprobs = network.score(batch, Wanted()).logprobs
    return list(torch.split(logprobs, [length - 1 for length in lengths]))


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
