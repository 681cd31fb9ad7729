"""Parts of single operations: publishing a version, and the two forms of a gradient's norm."""

import time

import torch
from torch import Tensor, nn

from benchmarks.gpu.random_models import QWEN_0_5B, QWEN_1_5B, TINY, make_model
from benchmarks.gpu.setting import Figures, Setting, milliseconds
from vcpo.api.workloads import Precision
from vcpo.wire.deltas import elements_of, write_changes
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts, as_factor
from vcpo_rollout.engines.loading_weights import tensors_of

_VERSIONS = 3
_CHANGED_SHARE = 0.01
"""Elements that a step changes in bfloat16 at the learning rates of RL, about."""


def publishing(setting: Setting) -> Figures:
    """Publish 1 or 3 GB: all of it, and then what changed, which is found on the device."""
    size = QWEN_0_5B if setting.is_quick else QWEN_1_5B
    model = make_model(setting.choose(size, TINY), setting.device)
    parameters = PublishedState(model)
    whole_s = setting.seconds(lambda: parameters.whole(Precision.BFLOAT16), repeats=1)
    full_set = parameters.whole(Precision.BFLOAT16)
    yield {
        "payload_gb": round(len(full_set) / 1e9, 3),
        "changed_share": _CHANGED_SHARE,
        "whole_s": round(whole_s, 4),
    }
    times_s = []
    for _ in range(_VERSIONS):
        _change(model)
        setting.wait()
        started_s = time.perf_counter()
        changes = parameters.take(Precision.BFLOAT16)
        times_s.append(time.perf_counter() - started_s)
        assert isinstance(changes, dict), "one element in a hundred is a delta"
        write_changes(elements_of(full_set), changes)
        num_changes = sum(change.positions.size for change in changes.values())
    num_elements = sum(each.numel() for each in model.parameters())
    yield {
        "changes_share": round(num_changes / num_elements, 4),
        "changes_found_s": round(min(times_s), 4),
        "parameters_match": _matches(model, full_set),
    }


@torch.no_grad()
def _change(model: nn.Module) -> None:
    for parameter in model.parameters():
        chosen = torch.rand_like(parameter) < _CHANGED_SHARE
        parameter.add_(chosen * 0.1)


def _matches(model: nn.Module, payload: bytearray) -> bool:
    named = dict(model.named_parameters())
    return all(
        torch.equal(named[name].detach().bfloat16().cpu(), each)
        for name, each in tensors_of(payload).items()
    )


def break_even(setting: Setting) -> Figures:
    """Time both forms of a norm, and derive the constant that chooses between them.

    kept: products of tokens with tokens, 2 T^2 (rows + columns) operations more than a plain step.
    reduced: the gradient is formed, squared and added to two totals; a plain step forms it too.
    """
    columns, rows = setting.choose((3584, 18_944), (64, 96))
    torch.manual_seed(0)
    values = torch.zeros(rows, columns, device=setting.device)
    touch_s = setting.seconds(lambda: values.add_(1.0)) / values.numel()
    yield {"rows": rows, "columns": columns, "ns_per_touch": touch_s * 1e9}
    cheaper = []
    for tokens in setting.choose((512, 1024, 2048, 4096, 8192), (8, 16)):
        factors = Factors(
            rows=_factor(setting, tokens, rows), columns=_factor(setting, tokens, columns)
        )
        kept_s = setting.seconds(lambda one=factors: one.inner_products(one, TokenProducts()))
        formed_s = setting.seconds(lambda one=factors: one.full(num_rows=rows))
        reduced_s = setting.seconds(lambda one=factors: _reduce(one.full(num_rows=rows)))
        rate = 2.0 * tokens**2 * (rows + columns) / kept_s
        if kept_s <= reduced_s - formed_s:
            cheaper.append(tokens)
        yield {
            f"tokens_{tokens}": {
                "kept_ms": milliseconds(kept_s),
                "reduced_ms": milliseconds(reduced_s - formed_s),
                "flops_per_touch": round(rate / 2.0 * touch_s, 1),
            }
        }
    yield {"kept_is_cheaper_up_to_tokens": max(cheaper, default=None)}


def _factor(setting: Setting, tokens: int, features: int) -> Tensor:
    values = torch.randn(1, tokens, features, device=setting.device)
    return as_factor(values, setting.dtype, torch.float32)


def _reduce(gradient: Tensor) -> Tensor:
    """What the reduced form does to a gradient after it is formed: square it, add it twice."""
    first, second = torch.zeros_like(gradient), torch.zeros_like(gradient)
    first.add_(gradient, alpha=0.5)
    second.add_(gradient)
    return torch.linalg.vector_norm(gradient)
