"""TRL's GRPOTrainer and `vcpo run` on the same training: python -m benchmarks.peers [--steps 100].

Same model, task, batch, loss (GRPO, on policy) and rate, one thread each; then the default method
with responses up to six versions old and two workers. Start-up is not compared: clocks begin after
the first step. It takes the extra `trl`, five minutes, and for wall-clock a quiet machine with two
cores. The last line is JSON, with ratios of this project to TRL, to a reward of 0.95.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import vcpo
from benchmarks.peers.training import (
    MODEL,
    NEW_TOKENS,
    PARAMETERS,
    PROMPTS,
    RATE,
    RESPONSES,
    ROOT,
    TASK,
    Step,
    summary,
)
from vcpo.local.run_dir import RunDir
from vcpo.service.lifecycle import read_ready

_ON_POLICY = {"algorithm": {"method": "grpo", "maxPolicyLagSteps": 0}, "workers": 1}
_ASYNC = {"algorithm": {"maxPolicyLagSteps": 6}, "workers": 2}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Train three times, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.update(_ONE_THREAD)
    found = {
        "trl": trl_side(options.steps, options.seed),
        "on_policy": our_side(options.steps, options.seed, _ON_POLICY),
        "asynchronous": our_side(options.steps, options.seed, _ASYNC),
    }
    sides = {name: summary(steps) for name, steps in found.items()}
    for name, side in sides.items():
        print(f"{name}: {json.dumps(side)}")
    print(json.dumps(comparison(sides)))


def comparison(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return ratios of this project to TRL; None where a side did not reach 0.95."""
    trl, ours, free = (sides[name] for name in ("trl", "on_policy", "asynchronous"))

    def ratio(side: Mapping[str, Any], key: str) -> float | None:
        mine, theirs = side["to_0.95"][key], trl["to_0.95"][key]
        return round(mine / theirs, 3) if mine and theirs else None

    return {
        "steps_ratio": ratio(ours, "steps"),
        "cpu_seconds_ratio": ratio(ours, "cpu_seconds"),
        "cpu_seconds_per_step_ratio": round(
            ours["cpu_seconds_per_step"] / trl["cpu_seconds_per_step"], 3
        ),
        "wall_ratio_async": ratio(free, "seconds"),
        "final_reward_difference": round(free["final_reward"] - trl["final_reward"], 3),
    }


def trl_side(num_steps: int, seed: int) -> list[Step]:
    """Train with TRL in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.trl_side", str(num_steps), str(seed)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - our own
    lines = (line.removeprefix("STEP ") for line in done.stdout.splitlines() if "STEP " in line)
    return [Step(**json.loads(line)) for line in lines]


def our_side(num_steps: int, seed: int, setting: Mapping[str, Any]) -> list[Step]:
    """Train with `vcpo run`, and read the clocks of its processes at each step."""
    steps: list[Step] = []
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder) / "run.yaml", Path(folder) / "run"
        file.write_text(json.dumps(_document(num_steps, seed, setting)), encoding="utf-8")
        first_s = first_cpu_s = 0.0
        with vcpo.train(file, run_dir=run_dir) as training:
            for number, record in enumerate(training):
                at_s, cpu_s = time.monotonic(), sum(_cpu_seconds(run_dir))
                if number == 0:
                    first_s, first_cpu_s = at_s, cpu_s
                workers_gib = record.worker_peak_gibibytes * setting["workers"]
                steps.append(
                    Step(
                        reward=record.reward_mean,
                        seconds=at_s - first_s,
                        cpu_seconds=cpu_s - first_cpu_s,
                        peak_gibibytes=record.learner_peak_gibibytes + workers_gib,
                    )
                )
    return steps


def _document(num_steps: int, seed: int, setting: Mapping[str, Any]) -> dict[str, Any]:
    workers = {"minReplicas": setting["workers"], "maxReplicas": setting["workers"]}
    return {
        "metadata": {"name": "peers"},
        "spec": {
            "seed": seed,
            "steps": num_steps,
            "model": {"name": str(MODEL)},
            "environment": {"name": TASK, "parameters": PARAMETERS},
            "batch": {"promptsPerStep": PROMPTS, "trajectoriesPerPrompt": RESPONSES},
            "sampling": {"maxNewTokens": NEW_TOKENS},
            "algorithm": setting["algorithm"],
            "optimizer": {"learningRate": RATE},
            "evaluation": {"everySteps": 10_000, "prompts": 16},
            "checkpoint": {"everySteps": 10_000},
            "control": {"pollSeconds": 0.2},
            "learner": {"threads": 1},
            "rollouts": [
                {"name": "main", "maxConcurrentSequences": 128, "threads": 1, **workers},
            ],
        },
    }


def _cpu_seconds(run_dir: Path) -> Iterator[float]:
    """Yield what the processes of a run have computed so far, and what those below them have."""
    ready = map(read_ready, RunDir(run_dir).processes.glob("*.json"))
    pids = [each.pid for each in ready if each is not None]
    while pids:
        pid = pids.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:  # it has ended
            continue
        pids += map(int, below)
        yield (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
