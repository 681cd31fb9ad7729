"""Train the pretrained model of the examples: make its directory, choose a number format, and run.

    python -m examples.demo_real examples/sums_smollm2.yaml

The format is bfloat16 where this machine multiplies matrices faster in it, else float32. The last
line printed is the JSON of `vcpo run --json`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from examples.models import smollm2
from vcpo.api import VCPORun, load_run, run_to_yaml
from vcpo.api.workloads import Precision
from vcpo.local.preflight import with_local_paths

_MODEL: Final = Path(__file__).parent / "models" / smollm2.NAME
_PRODUCT: Final = (1024, 576, 1536)
"""Rows, columns and inner size of the product that is timed: tokens through a layer."""
_REPEATS: Final = 20


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="run file")
    file = parser.parse_args().file
    try:
        smollm2.make(_MODEL)
    except smollm2.FetchError as error:
        raise SystemExit(str(error)) from error
    share = _product_s(torch.bfloat16) / _product_s(torch.float32)
    precision = Precision.BFLOAT16 if share < 1.0 else Precision.FLOAT32
    print(
        f"precision: {precision}; a product takes {share:.2g} of its time in float32 with bfloat16",
        flush=True,
    )
    run = _in_precision(with_local_paths(load_run(file), file), precision)
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder) / file.name
        chosen.write_text(run_to_yaml(run), encoding="utf-8")
        command = [sys.executable, "-m", "vcpo.cli.main", "run", str(chosen), "--json"]
        raise SystemExit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own


def _in_precision(run: VCPORun, precision: Precision) -> VCPORun:
    """Return the run with learner and workers in one number format."""
    change = {"precision": precision}
    learner = run.spec.learner.model_copy(update=change)
    groups = tuple(group.model_copy(update=change) for group in run.spec.rollouts)
    spec = run.spec.model_copy(update={"learner": learner, "rollouts": groups})
    return run.model_copy(update={"spec": spec})


def _product_s(dtype: torch.dtype) -> float:
    """Return the shortest time of a matrix product, where a model would run."""
    rows, columns, inner = _PRODUCT
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(_REPEATS):
        started_s = perf_counter()
        (left @ right).sum().item()  # the sum waits for a GPU
        best_s = min(best_s, perf_counter() - started_s)
    return best_s


if __name__ == "__main__":
    main()
