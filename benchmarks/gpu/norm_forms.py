"""Checks of the products behind gradient norms: their precision, and which form is cheaper."""

from __future__ import annotations

import torch

from benchmarks.gpu.setting import Figures, Setting, milliseconds, relative_error
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts, as_factor
from vcpo_learner.per_sample_gradients.factors import product as precise_product

_PRECISE = torch.float32


def norm_products(setting: Setting) -> Figures:
    """Form one trajectory's gradient of a 7 B model's widest layer, in each number format."""
    tokens, columns, rows = setting.choose((4096, 3584, 18_944), (32, 16, 48))
    torch.manual_seed(0)
    inputs = torch.randn(1, tokens, columns, device=setting.device).bfloat16()
    gradients = torch.randn(1, tokens, rows, device=setting.device).bfloat16()
    exact = gradients[0].double().mT @ inputs[0].double()
    flops = 2.0 * tokens * columns * rows
    yield {"tokens": tokens, "columns": columns, "rows": rows}
    for name, dtype, uses_tf32 in (
        ("bfloat16", torch.bfloat16, False),
        ("tf32", _PRECISE, True),
        ("float32", _PRECISE, False),
    ):
        if uses_tf32 and not setting.is_gpu:
            yield {name: {"skipped": "needs a GPU"}}
            continue
        torch.backends.cuda.matmul.allow_tf32 = uses_tf32
        left = as_factor(gradients, dtype, _PRECISE).mT
        right = as_factor(inputs, dtype, _PRECISE)
        found = precise_product(left, right)
        seconds = setting.seconds(lambda left=left, right=right: precise_product(left, right))
        norm, expected = float(found.double().norm()), float(exact.norm())
        yield {
            name: {
                "tflops": round(flops / seconds / 1e12, 3),
                "ms": milliseconds(seconds),
                "norm_relative_error": abs(norm - expected) / expected,
                "relative_error": relative_error(found[0], exact),
            }
        }
    torch.backends.cuda.matmul.allow_tf32 = False


def break_even(setting: Setting) -> Figures:
    """Time both forms of a norm, and derive the constant that chooses between them.

    kept: products of tokens with tokens, 2 T^2 (rows + columns) operations more than a plain step.
    reduced: the gradient is formed, squared and added to two totals; a plain step forms it too.
    """
    columns, rows = setting.choose((3584, 18_944), (64, 96))
    lengths = setting.choose((512, 1024, 2048, 4096, 8192), (8, 16))
    torch.manual_seed(0)
    touch_s = _touch_seconds(setting, rows, columns)
    yield {"rows": rows, "columns": columns, "ns_per_touch": touch_s * 1e9}
    by_length = {}
    for tokens in lengths:
        factors = Factors(
            rows=_factor(setting, tokens, rows), columns=_factor(setting, tokens, columns)
        )
        kept_s = setting.seconds(lambda one=factors: one.inner_products(one, TokenProducts()))
        formed_s = setting.seconds(lambda one=factors: one.full(num_rows=rows))
        reduced_s = setting.seconds(lambda one=factors: _reduce(one.full(num_rows=rows)))
        product_flops = 2.0 * tokens**2 * (rows + columns) / kept_s
        by_length[tokens] = {
            "kept_ms": milliseconds(kept_s),
            "reduced_ms": milliseconds(reduced_s - formed_s),
            "flops_per_touch": round(product_flops / 2.0 * touch_s, 1),
        }
    yield {"lengths": by_length}
    cheaper = [size for size, one in by_length.items() if one["kept_ms"] <= one["reduced_ms"]]
    yield {"kept_is_cheaper_up_to_tokens": max(cheaper, default=None)}


def _factor(setting: Setting, tokens: int, features: int) -> torch.Tensor:
    values = torch.randn(1, tokens, features, device=setting.device)
    return as_factor(values, setting.dtype, _PRECISE)


def _reduce(gradient: torch.Tensor) -> torch.Tensor:
    """What the reduced form does to a gradient after it is formed: square it, add it twice."""
    first, second = torch.zeros_like(gradient), torch.zeros_like(gradient)
    first.add_(gradient, alpha=0.5)
    second.add_(gradient)
    return torch.linalg.vector_norm(gradient)


def _touch_seconds(setting: Setting, rows: int, columns: int) -> float:
    """Seconds of reading and writing one number of main memory."""
    values = torch.zeros(rows, columns, device=setting.device)
    return setting.seconds(lambda: values.add_(1.0)) / values.numel()
