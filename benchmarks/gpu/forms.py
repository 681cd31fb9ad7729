"""Part of the two forms of a gradient's norm."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.setting import Figures, Setting, milliseconds
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts, as_factor


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
