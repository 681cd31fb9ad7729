"""Simulate runs from 10 to 10,000 workers, beside a real run of this machine.

A discrete-event model: workers generate groups, the learner's event loop takes them in, the ledger
admits, drops and batches them, the learner steps and publishes, and the workers read the files of
versions. Admission and buffer are the product's own code; times are constants (`constants`),
measured by other benchmarks or, of GPUs, calculated. docs/scaling.md says what the numbers mean.

    python -m benchmarks.simulate                      everything: two real runs, then the models
    python -m benchmarks.simulate --only local-run     the real runs: about 11 minutes, two cores
    python -m benchmarks.simulate --only scaling       simulations only: about 3 minutes of one core
    python -m benchmarks.simulate --only exchange      what ranks of a learner exchange, at once

The last line printed is JSON, with what was asked for of:

    matches_local_run       largest relative error of throughput and of mean lag against real runs
                            of `vcpo run`; `local_runs` has them one by one
    workers_at_bottleneck   by model: the first number of workers with less than .9 of linear
                            throughput, and what `limit` they wait for. `gathered`: the model's
                            learner, versions gathered in one process; `shards`: versions travel by
                            shards; `grown`: so they do, and learner and batch grow with the workers
    moved_by                the same for `shards` with one thing changed
    async_over_sync_k2_long_tail    steps per second at k = 2 over those at k = 0, lengths
                            log-normal with sigma 1; `async_over_sync` has other sigmas and k
    async_over_sync_k2_paper_shape  the same for the shape of the paper's longest run, by the share
                            of a synchronous step in which the learner computes
    scaling                 by model and number of workers: throughput, lag, limit
    exchange                seconds of a micro-step of a sharded learner, by link and by what its
                            ranks send when (`benchmarks.simulate.exchange`)
    constants               what the simulations used, and where it comes from

Exit status 1 when `matches_local_run` is above .15.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.async_speedup.trial import TrialFailedError
from benchmarks.harness.arguments import positive
from benchmarks.simulate import constants, scaling
from benchmarks.simulate.cluster import MODELS, Workload
from benchmarks.simulate.exchange import exchanges
from benchmarks.simulate.figures import figures
from benchmarks.simulate.local_run import HARDWARE, SETTINGS, Comparison, compare
from benchmarks.simulate.system import System

_ERROR_BAR: Final = 0.15
_LAGS: Final = (1, 2, 4, 8)
_LONG_TAIL_SIGMA: Final = 1.0


def main() -> int:
    """Do what was asked for, and print JSON."""
    arguments = parse_arguments()
    logging.basicConfig(format="%(relativeCreated)d ms: %(message)s", level=logging.INFO)
    report: dict[str, Any] = {"benchmark": "simulate"}
    if arguments.only in (None, "exchange", "scaling"):
        report["exchange"] = exchanges()
    if arguments.only in (None, "local-run"):
        with nullcontext(arguments.folder) if arguments.folder else TemporaryDirectory() as folder:
            try:
                report |= local_runs(Path(folder), speed=arguments.speed)
            except TrialFailedError as error:
                print(error, file=sys.stderr)
                return 1
    if arguments.only in (None, "scaling"):
        report |= tails() | workers(arguments.workers, arguments.grown)
        report["constants"] = {
            name: f"{constant.value:.4g} {constant.unit}; {constant.source}"
            for name, constant in (constants.MEASURED | constants.ASSUMED).items()
        }
    print(json.dumps(report))
    return int(report.get("matches_local_run", 0.0) > _ERROR_BAR)


def local_runs(folder: Path, *, speed: int) -> dict[str, Any]:
    """Run and simulate every setting."""
    found: list[Comparison] = []
    for setting in SETTINGS:
        place = folder / f"{setting.workers}-workers-lag-{setting.lag}"
        found.append(compare(setting, HARDWARE.faster(speed), place))
        print(found[-1].line(), flush=True)
    errors = [error for one in found for error in (one.throughput_error, one.lag_error)]
    return {
        "matches_local_run": round(max(errors), 4),
        "local_runs": [one.rounded() for one in found],
    }


def tails() -> dict[str, Any]:
    """Simulate what asynchrony gains as the tail of the lengths grows."""
    gains: dict[str, dict[str, float]] = {}
    for sigma in scaling.TAIL_SIGMAS:
        gains[f"sigma_{sigma:g}"] = {
            f"k{lag}": round(scaling.async_over_sync(sigma, lag), 2) for lag in _LAGS
        }
        print(f"sigma {sigma:g}: steps per second over those at k = 0: {gains[f'sigma_{sigma:g}']}")
    paper = {
        f"{share:g}": round(scaling.paper_gain(share), 2) for share in scaling.PAPER_LEARNER_SHARES
    }
    print(f"the paper's shape, k = 2, by the learner's share of a synchronous step: {paper}")
    return {
        "async_over_sync_k2_long_tail": gains[f"sigma_{_LONG_TAIL_SIGMA:g}"]["k2"],
        "async_over_sync": gains,
        "async_over_sync_k2_paper_shape": paper,
    }


def workers(fixed_numbers: Sequence[int], grown_numbers: Sequence[int]) -> dict[str, Any]:
    """Simulate every model, with its learner and with one that grows with the workers."""
    workload = Workload()
    first: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for model in MODELS:
        gathered, shards = (
            scaling.fixed_learner(model, workload, by_shards=way) for way in (False, True)
        )
        fed_by = round(scaling.workers_of_balance(model, workload))
        grown = scaling.grown_learner(model, workload, fed_by=fed_by)
        ways = {"gathered": (gathered, 1), "shards": (shards, 1), "grown": (grown, fed_by)}
        first[model.name] = {
            name: _json(scaling.bottleneck(system_of, start=start))
            for name, (system_of, start) in ways.items()
        }
        print(f"{model.name}: the first bottleneck: {first[model.name]}", flush=True)
        moved[model.name] = {
            name: _json(scaling.bottleneck(_moved(shards, lever), start=1))
            for name, lever in scaling.LEVERS.items()
        }
        print(f"{model.name}, shards: the first bottleneck with {moved[model.name]}", flush=True)
        for name, numbers in (("shards", fixed_numbers), ("grown", grown_numbers)):
            for number in numbers:
                found = figures(ways[name][0](number)).rounded()
                rows.setdefault(model.name, {}).setdefault(name, {})[str(number)] = found
                print(f"{model.name} {name}, {number} workers: {found}", flush=True)
    return {"workers_at_bottleneck": first, "moved_by": moved, "scaling": rows}


def _moved(
    system_of: Callable[[int], System], lever: Callable[[System], System]
) -> Callable[[int], System]:
    return lambda workers: lever(system_of(workers))


def _json(found: scaling.Bottleneck | None) -> dict[str, Any] | None:
    return None if found is None else {"workers": found.workers, "limit": str(found.limit)}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", choices=("local-run", "scaling", "exchange"), help="a part")
    parser.add_argument(
        "--workers", type=positive, nargs="+", default=[10, 100, 1000, 10_000], help="one learner"
    )
    parser.add_argument(
        "--grown",
        type=positive,
        nargs="+",
        default=[10, 100, 1000],
        help="workers with a learner that grows with them; more take many minutes",
    )
    parser.add_argument(
        "--speed",
        type=positive,
        default=10,
        help="divides the real runs' times; what is not paced, such as gRPC, then takes a larger"
        " share of a step",
    )
    parser.add_argument("--folder", type=Path, help="where the real runs stay, new or empty")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
