"""Where the time of a study's cell goes, and how far it is from its arithmetic.

    python -m benchmarks.study_cell examples/studies/countdown.yaml
    python -m benchmarks.study_cell examples/studies/sort-long.yaml --methods vcpo2 --lag 8

A cell of each method is trained for some steps in this thread. The numbers are milliseconds of
processor time a step, so that other processes count little; on a busy machine they are still larger
than on an idle one, since caches and execution units are shared. The last line is JSON, by method:

    sampling_ms     the batch: prompts, decoding, rewards
    update_ms       scores, gradient norms, gradient, decision, optimizer
    evaluation_ms   one evaluation, divided by the steps between two of them
    step_ms         the sum
    products_ms     what the step's matrix products and attention take at the speed of one large
                    product: a step of a tiny model cannot be shorter
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils.logging import disable_progress_bar

from research.cells.cell import Cell, Selection, plane_cells
from research.cells.experiment import Experiment
from research.study import load_study, model_directory

_WARM_UP_STEPS = 2
_COUNTED_STEPS = 4


class Stopwatch:
    """Adds up the processor time of blocks of code, in milliseconds."""

    def __init__(self) -> None:
        self.total_ms = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a block."""
        started_s = time.process_time()
        yield
        self.total_ms += 1e3 * (time.process_time() - started_s)


def cell_times(cell: Cell, model_name: str, *, steps: int, flops_per_ms: float) -> dict[str, float]:
    """Train a cell for some steps, and return its times a step in milliseconds."""
    experiment = Experiment(cell, model_name)
    sampling, update, evaluation = Stopwatch(), Stopwatch(), Stopwatch()
    for version in range(_WARM_UP_STEPS):
        experiment.publish()
        experiment.step(version, experiment.sample(version))
    for version in range(_WARM_UP_STEPS, _WARM_UP_STEPS + steps):
        experiment.publish()
        with sampling.running():
            groups = experiment.sample(version)
        with update.running():
            experiment.step(version, groups)
    last = _WARM_UP_STEPS + steps
    experiment.publish()
    with evaluation.running():
        experiment.evaluate(last)
    with FlopCounterMode(display=False) as counter:
        for version in range(last, last + _COUNTED_STEPS):
            experiment.step(version, experiment.sample(version))
            experiment.publish()
    times = {
        "sampling_ms": sampling.total_ms / steps,
        "update_ms": update.total_ms / steps,
        "evaluation_ms": evaluation.total_ms / cell.spec.evaluation.every_steps,
    }
    whole = {"step_ms": sum(times.values())}
    products = {"products_ms": counter.get_total_flops() / _COUNTED_STEPS / flops_per_ms}
    return {name: round(value, 1) for name, value in (times | whole | products).items()}


def large_product_flops_per_ms(size: int = 512, repetitions: int = 20) -> float:
    """Return the floating-point operations of a large matrix product in a millisecond."""
    factor = torch.randn(size, size)
    factor @ factor
    watch = Stopwatch()
    with watch.running():
        for _ in range(repetitions):
            factor @ factor
    return repetitions * 2.0 * size**3 / watch.total_ms


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", type=Path, help="YAML file of a study")
    parser.add_argument("--methods", nargs="+", default=["reinforce", "vcpo", "vcpo2"])
    parser.add_argument("--lag", type=int, default=8, help="lag of the cells [%(default)s]")
    parser.add_argument("--steps", type=int, default=24, help="steps of a cell [%(default)s]")
    return parser.parse_args()


def main() -> None:
    """Measure a cell of each method and print the table and the JSON line."""
    options = _options()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    study = load_study(options.study)
    model_name = model_directory(study, options.study)
    flops_per_ms = large_product_flops_per_ms()
    found = {}
    for name in options.methods:
        selection = Selection(methods=frozenset({name}), lags=frozenset({options.lag}))
        cells = plane_cells(study.spec, selection)
        if not cells:
            raise SystemExit(f"--methods {name}, --lag {options.lag}: the plane has no such cell")
        # The second rate: the first is chosen too low to learn in so few steps.
        cell = cells[min(1, len(cells) - 1)]
        found[name] = cell_times(cell, model_name, steps=options.steps, flops_per_ms=flops_per_ms)
        print(f"{cell.name:32s} {found[name]}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
