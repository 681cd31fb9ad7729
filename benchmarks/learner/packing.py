"""Measure what packed rows save an update, by the spread of the responses' lengths.

The learner's own passes, with exact norms and optimal baseline, run over the same trajectories with
`batch.rowLayout` padded and packed. Lengths are log-normal, truncated at the sequence length.
`spread` is the standard deviation of their logarithm; responses with reasoning have about 0.5 to 1.
A group stays in one micro-batch, so its longest response determines the padding.

CPU seconds are the least of several repeats; both sides take turns.

    python -m benchmarks.learner.packing

The last line printed is JSON; `packed_over_padded` below 1 means that packing pays.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness.random_llama import random_groups, random_llama, shorten
from benchmarks.learner.opob_overhead import Groups, Size, vcpo_step
from vcpo.wire.trajectory import Trajectory

SIZE = Size(hidden=256, sequence=512, num_groups=4, group_size=8, micro_batch=16)
SIDES = {"padded": SIZE, "packed": replace(SIZE, packs=True)}


def groups_of_spread(model: LlamaForCausalLM, spread: float, seed: int) -> Groups:
    """Return groups with responses of log-normal lengths; the median is half of the sequence."""
    random = Random(seed)  # noqa: S311 - lengths, not secrets
    prompt_tokens = SIZE.sequence // 8
    longest = SIZE.sequence - prompt_tokens
    groups = random_groups(
        model,
        num_groups=SIZE.num_groups,
        group_size=SIZE.group_size,
        prompt_tokens=prompt_tokens,
        response_tokens=longest,
    )

    def cut_to_length(one: Trajectory) -> Trajectory:
        drawn = round(longest / 2 * math.exp(random.gauss(0.0, spread)))
        return shorten(one, min(max(drawn, 1), longest))

    return [[cut_to_length(one) for one in group] for group in groups]


def padding_share(groups: Groups) -> float:
    """Return the share of padding when each group is padded to its longest response."""
    lengths = [
        [len(one.prompt_token_ids) + len(one.response_token_ids) for one in group]
        for group in groups
    ]
    return 1.0 - sum(map(sum, lengths)) / sum(max(each) * len(each) for each in lengths)


def measure(model: LlamaForCausalLM, spread: float, repeats: int) -> dict[str, Any]:
    """Measure both sides on one batch."""
    groups = groups_of_spread(model, spread, seed=1)
    least_s = dict.fromkeys(SIDES, math.inf)
    norms: dict[str, Sequence[float]] = {}
    for _ in range(repeats):
        for side, size in SIDES.items():
            model.zero_grad()
            started = time.process_time()
            norms[side] = vcpo_step(model, groups, size)
            least_s[side] = min(least_s[side], time.process_time() - started)
    pairs = zip(norms["packed"], norms["padded"], strict=True)
    return {
        "packed_over_padded": round(least_s["packed"] / least_s["padded"], 3),
        "padding_share": round(padding_share(groups), 3),
        "norm_rel_error": fmean(abs(packed - padded) / padded for packed, padded in pairs),
        "seconds": {side: round(value, 3) for side, value in least_s.items()},
    }


def main() -> None:
    """Measure every spread and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spreads", nargs="+", type=float, default=[0.0, 0.25, 0.5, 1.0])
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = random_llama(SIZE.hidden, max_tokens=SIZE.sequence)
    report = {}
    for spread in arguments.spreads:
        found = report[f"spread {spread}"] = measure(model, spread, arguments.repeats)
        print(f"spread {spread}: {found['seconds']}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
