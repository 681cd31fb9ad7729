"""A check, with a worker's first weights, that a model can be decoded as this engine decodes.

The engine pads sequences on the left and keeps only keys and values. A model whose state is
recurrent, or that counts positions by itself, would be sampled from another distribution than its
own, without any error. Families do not tell: some take a cache that they do not read. So a few
tokens are decoded in both ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vcpo.algo.agreement import is_rounding
from vcpo.service.lifecycle import StartError
from vcpo_rollout.engines.hf.cache import DecodingCache

_PROMPTS: Final = ((7, 9, 4), (5, 3, 8, 6, 2, 9, 4, 7), (2,))
_RESPONSES: Final = ((5, 6, 8, 3, 9), (9, 4, 3, 2, 6), (7, 8, 5))


@torch.inference_mode()
def require_decodable(model: PreTrainedModel, pad_token_id: int) -> None:
    """Check that a model's log-probabilities are those of its sequences alone.

    The check takes about ten forward passes of a few tokens. Weights whose numbers are not finite
    say nothing, and pass.
    """
    family = model.config.model_type
    cure = "use `engine: vllm` if it has the family, or another model"
    try:
        padded, cached, size = _gaps(model, pad_token_id)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a model's own code runs there
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StartError(
            f"spec.model.name: engine hf cannot decode models of family {family} ({reason}); {cure}"
        ) from error
    gap, is_half = max(padded, cached), model.dtype.itemsize == 2
    if math.isfinite(size) and not is_rounding(gap, size, is_half=is_half):
        raise StartError(
            f"spec.model.name: engine hf would sample wrongly from a model of family {family}: its"
            f" log-probabilities of a sequence alone differ by {padded:.2g} nats from those beside"
            f" a longer one, and by {cached:.2g} nats from those of token after token; {cure}"
        )


def _gaps(model: PreTrainedModel, pad_token_id: int) -> tuple[float, float, float]:
    """Root mean squares, nats: of both gaps, and of the log-probabilities of sequences alone."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts, responses = (
        [[token % vocabulary for token in row] for row in rows] for rows in (_PROMPTS, _RESPONSES)
    )
    alone = [
        _alone(model, [*prompt, *response])[len(prompt) - 1 :]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    cache = DecodingCache(model, pad_token_id=pad_token_id)
    num_read = [0, 0, 0]

    def gap(rows: Sequence[int], logits: Tensor) -> Tensor:
        expected = torch.stack([alone[row][num_read[row]] for row in rows])
        return (_logprobs(logits) - expected).flatten()

    def extend_rows(rows: Sequence[int]) -> Tensor:
        logits = cache.extend([responses[row][num_read[row]] for row in rows])
        for row in rows:
            num_read[row] += 1
        return gap(rows, logits)

    padded = gap([0, 1], cache.join(prompts[:2]))
    cached = [extend_rows([0, 1]), extend_rows([0, 1])]
    cached += [gap([2], cache.join(prompts[2:])), extend_rows([0, 1, 2])]
    # The longest leaves, and the padding of the others shrinks.
    cached.append(extend_rows([[0, 1, 2][row] for row in cache.remove({1})]))
    return _root_mean_square(padded), _root_mean_square(torch.cat(cached)), _size(alone)


def _alone(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    tokens = torch.tensor([token_ids], device=model.device)
    return _logprobs(model(input_ids=tokens, use_cache=False).logits[0])


def _logprobs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1)


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _size(rows: Sequence[Tensor]) -> float:
    return _root_mean_square(torch.cat([row.flatten() for row in rows]))
