"""Answer what only a GPU can tell: twelve checks in ten minutes, one JSON line each.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --checks 1 2 3 --limit-seconds 300
    python -m benchmarks.gpu --device cpu --tiny    the same code on a CPU; no figures

Models have random parameters; nothing is fetched. The first line says what the machine has and
what it lacks. Then, in this order:

    1 norm_products            bfloat16 against TF32 and float32: TFLOPS and error of norms
    2 output_head              by tiles and with full logits, vocabulary 152k: ms, GiB, difference
    3 step_speed               1.5 B, 16k tokens, checkpointed: plain, group mean, OPOB in one and
                               two passes, logit energy: tokens/s, share of the rate of a large
                               product (aim 0.4), seconds over plain (aim 1.1), GiB
    4 step_beside_trl          the same beside TRL's step
    5 attention                padded sdpa and varlen packed, up to 2k, 8k, 32k tokens
    6 longest_trajectory       that fits: 1.5 B, and 7 B with LoRA
    7 break_even               constants that choose between the two forms of a norm
    8 sharded_step             FSDP2 on one rank, both modes, against the unsharded step
    9 publishing               3 GB: all to the host, and what changed, found on the device
    10 swap_pauses             vLLM's pauses for all weights, a delta, adapters
    11 sampler_against_learner the same weights and tokens: nats per token, ESS by length
    12 whole_run               twenty steps of `vcpo run`, learner and vLLM on one card

A check that lacks something says so in its line (`skipped`), one that fails has `error`, and one
that the time limit ends has what it found until then and `stopped`. The last line sums up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.suite import CHECKS, ENVIRONMENT, Check, run_check

_USELESS_S = 5.0
"""With less time left, no check is started."""


def run_checks(checks: Sequence[Check], setting: Setting, limit_s: float) -> list[dict[str, Any]]:
    """Run checks one after another and print their lines, until the time is up."""
    deadline_s = time.monotonic() + limit_s
    lines = []
    for check in checks:
        left_s = deadline_s - time.monotonic()
        if left_s < _USELESS_S:
            line = {"check": check.number, "name": check.name, "skipped": "no time left"}
        else:
            line = run_check(check, setting, left_s)
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return which checks are complete, and which are not and why."""
    troubles = ("error", "skipped", "stopped")
    complete = [line for line in lines if not any(key in line for key in troubles)]
    return {
        "benchmark": "gpu",
        "complete": [line["check"] for line in complete],
        **{
            key: {str(line["check"]): line[key] for line in lines if key in line}
            for key in troubles
        },
    }


def main() -> None:
    """Run the checks and print their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checks", nargs="+", type=int, help="numbers; all if unset")
    parser.add_argument("--limit-seconds", type=float, default=600.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("argument --device: sizes are those of a GPU; add --tiny for a CPU")
    numbers = [check.number for check in CHECKS]
    unknown = sorted(set(arguments.checks or ()) - set(numbers))
    if unknown:
        parser.error(f"argument --checks: {unknown} are no checks; give some of 1 to {len(CHECKS)}")
    setting = Setting(device=torch.device(arguments.device), is_tiny=arguments.tiny)
    chosen = [each for each in CHECKS if each.number in (arguments.checks or numbers)]
    started_s = time.monotonic()
    found = run_check(ENVIRONMENT, setting, arguments.limit_seconds)
    print(json.dumps(found), flush=True)
    if setting.is_gpu and "gpu" not in found:
        lines = [
            {"check": each.number, "name": each.name, "skipped": "needs a GPU"} for each in chosen
        ]
        for line in lines:
            print(json.dumps(line))
    else:
        left_s = arguments.limit_seconds - (time.monotonic() - started_s)
        lines = run_checks(chosen, setting, left_s)
    print(json.dumps(summary(lines)))


if __name__ == "__main__":
    main()
