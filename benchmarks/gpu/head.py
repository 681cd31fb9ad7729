"""Check of the output head: by tiles of the vocabulary against full logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.setting import Figures, Setting, milliseconds, relative_error
from vcpo_learner.output_head.logit_tiles import LogitForm
from vcpo_learner.output_head.tiled_head import HeadRequest, apply_head


def output_head(setting: Setting) -> Figures:
    """Score and differentiate the same tokens both ways, at the head of a 7 B model."""
    hidden_size, vocabulary = setting.choose((3584, 152_064), (16, 300))
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, hidden_size, device=setting.device) * 0.02
    weight = weight.to(setting.dtype).requires_grad_()
    yield {"hidden": hidden_size, "vocabulary": vocabulary}
    for tokens in setting.choose((4096, 8192, 16_384), (24, 48)):
        hidden = torch.randn(tokens, hidden_size, device=setting.device, dtype=setting.dtype)
        targets = torch.randint(0, vocabulary, (tokens,), device=setting.device)
        found = {}
        for name, score in (("tiled", _tiled), ("full", _full)):
            found[name] = _measured(setting, score, hidden.requires_grad_(), weight, targets)
        yield {f"tokens_{tokens}": _line(found)}


def _tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return apply_head(
        hidden, weight, None, HeadRequest(targets=targets, form=LogitForm(), temperature=1.0)
    ).logprobs


def _full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.mT).float()
    return logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


def _measured(
    setting: Setting, score: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor
) -> dict[str, object]:
    """Milliseconds, memory and results of one way; `error` where it does not fit."""

    def once() -> tuple[Tensor, Tensor]:
        logprobs = score(hidden, weight, targets)
        gradients = torch.autograd.grad(logprobs.mean(), [hidden, weight])
        return logprobs.detach(), gradients[1]

    setting.forget()
    try:
        logprobs, gradient = once()
        peak_gib = setting.peak_gib()
        return {
            "ms": milliseconds(setting.seconds(once, repeats=3)),
            "peak_gib": peak_gib,
            "results": (logprobs.cpu(), gradient.cpu()),
        }
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def _line(found: dict[str, dict[str, object]]) -> dict[str, object]:
    results = [one.pop("results", None) for one in found.values()]
    line: dict[str, object] = dict(found)
    if all(one is not None for one in results):
        tiled, full = results
        line["logprob_max_difference_nats"] = float((tiled[0] - full[0]).abs().max())
        line["gradient_relative_error"] = relative_error(tiled[1], full[1])
    return line
