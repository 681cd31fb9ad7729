"""Measure how much sooner asynchronous training reaches the accuracy of synchronous training.

Every run is `vcpo run`'s: its host, a learner, workers, leases, and weights over gRPC. A tiny model
really learns to sort digits from responses that it really sampled. Hardware is played by pauses: a
group is held back until the longest of eight drawn lengths has passed at a given time per token,
and the gradient of a batch takes at least a given time. `hardware.REFERENCE` names the figures and
their reasons; `--speed` divides all of them, so that a run takes minutes.

What dominates is the tail of the lengths. A synchronous step waits for the longest of 32 responses
and then for the learner. An asynchronous one takes the larger of two times: the learner's step, and
that of the workers to generate one batch. `step_speedup_limit` is the quotient. Nothing reaches it
with a small k: a group that takes longer than about k + 1 steps is dropped and generated again.

    python -m benchmarks.async_speedup                          eight runs, about 25 minutes
    python -m benchmarks.async_speedup --workers 2 --lags 2     two runs

Not modelled: decoding that slows down as more responses share a worker, the transfer of large
weights, and weights that change in mid-response. Decoding and gRPC, which are real, come on top of
the pauses: on a machine without a free core for them use a lower `--speed`.

The target is 0.95 of the final accuracy of the synchronous run with as many workers. Accuracies are
those of the run's checkpoints, every eight steps, on the same held-out prompts; they are measured
after the run. The final one is the mean over the last quarter of the steps. The clock starts when
every worker has started.

The last line printed is JSON: `speedup_k<k>`, time to the target at k = 0 over that at k, and
`accuracy_gap`, final accuracy of k = 0 minus the lowest of the others; each is the worst over the
numbers of workers, which `workers` has one by one, with all figures of each run. Aims: `speedup_k2`
at least 1.5, `speedup_k8` at least 2.0, `accuracy_gap` at most 0.01.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.async_speedup.comparison import Row, row, summary
from benchmarks.async_speedup.hardware import REFERENCE
from benchmarks.async_speedup.trial import Setting, TrialFailedError, run_trial
from benchmarks.harness.measures import parser_of


def main() -> int:
    """Run every setting and print the figures."""
    arguments = parse_arguments()
    with nullcontext(arguments.folder) if arguments.folder else TemporaryDirectory() as folder:
        try:
            found = {
                str(workers): summary(compare(arguments, workers, Path(folder)))
                for workers in arguments.workers
            }
        except TrialFailedError as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps(worst(found, arguments.lags)))
    return 0


def compare(arguments: argparse.Namespace, workers: int, folder: Path) -> list[Row]:
    """Run synchronously and with every lag; print and return the figures."""
    hardware = REFERENCE.faster(arguments.speed)
    trials, rows = [], []
    for lag in (0, *arguments.lags):
        setting = Setting(lag=lag, workers=workers, steps=arguments.steps, seed=arguments.seed)
        place = folder / f"{workers}-workers-lag-{lag}"
        trials.append(run_trial(setting, hardware, place, prompts=arguments.prompts))
        rows.append(row(trials[-1], trials[0], hardware))
        print(f"{workers} workers, {rows[-1].line()}", flush=True)
    return rows


def worst(found: Mapping[str, Mapping[str, Any]], lags: Sequence[int]) -> dict[str, Any]:
    """Return the JSON of the last line.

    found: summaries by number of workers. A speed-up that one of them lacks is null.
    """
    speedups: dict[str, float | None] = {}
    for name in (f"speedup_k{lag}" for lag in lags):
        each = [one[name] for one in found.values()]
        speedups[name] = None if None in each else min(each)
    gap = max(one["accuracy_gap"] for one in found.values())
    return {"benchmark": "async_speedup", **speedups, "accuracy_gap": gap, "workers": dict(found)}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(
        __doc__,
        workers=[2, 6],
        lags=([1, 2, 8], "besides 0"),
        steps=(96, "of every run"),
        speed=(40, "divides all times of hardware"),
        seed=1,
        prompts=(4096, "for each accuracy"),
    )
    parser.add_argument("--folder", type=Path, help="where run directories stay, new or empty")
    arguments = parser.parse_args()
    numbers = (*arguments.workers, *arguments.lags, arguments.steps, arguments.speed)
    if min(*numbers, arguments.prompts) < 1:
        parser.error("give numbers of at least 1")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
