"""Measure what a step of the learner costs beside a plain one and TRL's.

All sides train a Llama of hidden size 256 with 4 layers in float32 on one CPU thread (a Qwen3.5, of
which three layers have a delta rule, for the sizes `hybrid`, if asked for), on the same random
trajectories, in the same micro-batches, up to the parameters' change by AdamW:

    plain   what a training loop on transformers does, with the logits of all tokens
    mean    the learner's step without gradient norms (the group's mean as baseline)
    opob    the learner's step with the optimal baseline
    trl     TRL's GRPO step, where TRL is installed (it is no dependency of the project)

Each side has a process of its own; the learner's keep the memory that they free, as it does on a
CPU. They take turns; a figure is the median of CPU seconds. Memory is the largest growth of a
process's resident set: model, optimizer and gradient included. Sizes are written VOCABULARYxTOKENS,
with the tokens of a trajectory; a quarter of them is prompt.

    python -m benchmarks.learner_step

The last line printed is JSON. Aims: `ratio_vs_plain_min` (tokens per second of `opob`, over those
of `plain`, at the worst size) at least 0.85; `ratio_vs_trl_min` at least 1.0, null without TRL;
`peak_memory_ratio_vs_plain_max` (`opob` over `plain`, at a vocabulary of 128k) at most 0.5.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.harness.measures import parser_of
from benchmarks.learner_step.sides import (
    FOLDER,
    PRETRAINED,
    QUICK_SIZES,
    SIZES,
    Side,
    SideProcess,
    Size,
    groups_made_elsewhere,
)
from examples.models import smollm2

LARGE_VOCABULARY = 128_000
"""From here on the memory aim holds."""


def measure(name: str, size: Size, sides: Sequence[Side], repeats: int) -> dict[str, Any]:
    """Measure every side at one size."""
    groups = groups_made_elsewhere(size)
    seconds: dict[Side, list[float]] = {side: [] for side in sides}
    with ExitStack() as stack:
        processes = {side: stack.enter_context(SideProcess(side, size, groups)) for side in sides}
        for repeat in range(repeats):
            for side, process in processes.items():
                seconds[side].append(process.step())
                print(
                    f"{name}: {side} {seconds[side][-1]:.2f} s ({repeat + 1}/{repeats})", flush=True
                )
        peaks = {side: process.peak_bytes() for side, process in processes.items()}
    return cell(size, seconds, peaks)


def cell(
    size: Size, seconds: Mapping[Side, Sequence[float]], peaks: Mapping[Side, int]
) -> dict[str, Any]:
    """Return the figures of one size; a ratio is null where one of its sides was left out.

    seconds: CPU seconds of each repeat. peaks: bytes.
    """
    tokens_per_s = {side: size.num_tokens / median(each) for side, each in seconds.items()}
    opob = tokens_per_s.get(Side.OPOB)
    return {
        "vocabulary": size.vocabulary,
        "tokens_per_s": {side: round(each, 1) for side, each in tokens_per_s.items()},
        "peak_mib": {side: each >> 20 for side, each in peaks.items()},
        "ratio_vs_plain": _ratio(opob, tokens_per_s.get(Side.PLAIN)),
        "ratio_vs_trl": _ratio(opob, tokens_per_s.get(Side.TRL)),
        "mean_ratio_vs_plain": _ratio(tokens_per_s.get(Side.MEAN), tokens_per_s.get(Side.PLAIN)),
        "peak_memory_ratio_vs_plain": _ratio(peaks.get(Side.OPOB), peaks.get(Side.PLAIN)),
    }


def summary(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst figures of all sizes; null where no size has one."""
    large = [each for each in cells.values() if each["vocabulary"] >= LARGE_VOCABULARY]
    memory = [each["peak_memory_ratio_vs_plain"] for each in large]
    return {
        "ratio_vs_plain_min": _least([each["ratio_vs_plain"] for each in cells.values()]),
        "ratio_vs_trl_min": _least([each["ratio_vs_trl"] for each in cells.values()]),
        "peak_memory_ratio_vs_plain_max": max(filter(None, memory), default=None),
        "sizes": cells,
    }


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else round(value / other, 3)


def _least(ratios: Sequence[float | None]) -> float | None:
    return min(filter(None, ratios), default=None)


def main() -> None:
    """Measure every size and print."""
    pretrained = "only the batch of make demo-real, in bfloat16"
    quick = "tiny sizes, to see that it works"
    usual = [name for name, size in SIZES.items() if not size.is_hybrid]
    parser = parser_of(
        __doc__,
        repeats=(3, "steps of each side"),
        pretrained=(False, pretrained),
        quick=(False, quick),
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=usual)
    parser.add_argument("--sides", nargs="+", type=Side, choices=list(Side), default=list(Side))
    arguments = parser.parse_args()
    sizes = QUICK_SIZES if arguments.quick else {name: SIZES[name] for name in arguments.sizes}
    if arguments.pretrained:
        smollm2.make(FOLDER)
        sizes = {"smollm2": PRETRAINED}
    sides = [side for side in arguments.sides if side.is_installed]
    for side in set(arguments.sides) - set(sides):
        print(f"{side} is not installed: its figures are null", flush=True)
    cells = {}
    for name, size in sizes.items():
        cells[name] = measure(name, size, sides, arguments.repeats)
        print(f"{name}: {json.dumps(cells[name])}", flush=True)
    print(json.dumps({"benchmark": "learner_step", **summary(cells)}))


if __name__ == "__main__":
    main()
