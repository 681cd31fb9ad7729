"""Measure how much a run improves, and how much that varies with the seed.

Runs one file with several seeds, one after the other, exactly as `vcpo run` does. The last line of
output is one JSON object: accuracies before and after on held-out prompts, by seed, and their mean
and sample standard deviation.

    python -m benchmarks.seeds examples/countdown.yaml --seeds 0 1 2
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vcpo.api import VCPORun, load_run, run_to_yaml
from vcpo.local.preflight import with_local_paths


def run_once(run: VCPORun, seed: int, folder: Path) -> dict[str, Any]:
    """Train with a seed and return the summary of `vcpo run --json`.

    Raises:
        subprocess.CalledProcessError: when the run fails; its output says why.
    """
    seeded = run.model_copy(update={"spec": run.spec.model_copy(update={"seed": seed})})
    file = folder / f"seed-{seed}.yaml"
    file.write_text(run_to_yaml(seeded), encoding="utf-8")
    command = [sys.executable, "-m", "vcpo.cli.main", "run", str(file), "--json"]
    command += [f"--run-dir={folder / f'seed-{seed}'}"]
    # Our own module, by our own interpreter.
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    return summary


def spread(values: list[float]) -> dict[str, Any]:
    """Return values with their mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"values": values, "mean": statistics.fmean(values), "standard_deviation": deviation}


def main() -> None:
    """Run every seed and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the run, a VCPORun in YAML")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    run = with_local_paths(load_run(arguments.file), arguments.file)
    summaries = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            summary = run_once(run, seed, Path(folder))
            summaries.append(summary)
            before, after = summary["accuracy_before"], summary["accuracy_after"]
            print(f"seed {seed}: {before:.3f} -> {after:.3f} in {summary['steps']} steps")
    spreads = ("accuracy_before", "accuracy_after", "policy_lag_mean")
    result = {
        "run": run.metadata.name,
        "seeds": arguments.seeds,
        "steps": run.spec.steps,
        **{name: spread([each[name] for each in summaries]) for name in spreads},
        "ess_ratio_min": min(summary["ess_ratio_min"] for summary in summaries),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
