"""Measure what 8-bit numbers cost a CPU: one product of a layer in fp8 and in bfloat16.

The operation is the one that vLLM's `fp8_per_channel` uses on a CPU: `torch._scaled_mm`, one scale
for each row of both factors. Seconds are the least of several repeats; both sides take turns.

    python -m benchmarks.rollout.fp8_product

The last line printed is JSON; `fp8_over_bfloat16` above 1 means that fp8 is slower.
"""

import argparse
import json
import math
import time

import torch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--inputs", type=int, default=768)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randn(arguments.tokens, arguments.inputs).bfloat16()
    weight = torch.randn(arguments.outputs, arguments.inputs).bfloat16()
    eight_bit = torch.float8_e4m3fn
    small_tokens, small_weight = tokens.to(eight_bit), weight.to(eight_bit).T
    scales = torch.ones(arguments.tokens, 1), torch.ones(1, arguments.outputs)
    sides = {
        "bfloat16": lambda: tokens @ weight.T,
        "fp8": lambda: torch._scaled_mm(
            small_tokens, small_weight, *scales, out_dtype=torch.bfloat16
        ),
    }
    least_s = dict.fromkeys(sides, math.inf)
    for _ in range(arguments.repeats):
        for side, product in sides.items():
            started = time.perf_counter()
            product()
            least_s[side] = min(least_s[side], time.perf_counter() - started)
    ratio = least_s["fp8"] / least_s["bfloat16"]
    milliseconds = {side: round(1e3 * seconds, 3) for side, seconds in least_s.items()}
    print(json.dumps({"fp8_over_bfloat16": round(ratio, 2), "milliseconds": milliseconds}))


if __name__ == "__main__":
    main()
