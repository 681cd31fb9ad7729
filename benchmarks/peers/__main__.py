"""TRL's GRPOTrainer and `vcpo run` on the same training: python -m benchmarks.peers [--model NAME].

Same model, task, batch, loss (GRPO, on policy) and rate, one thread each; then the default method,
whose workers generate ahead. Start-up is not compared: clocks begin after the first step. It takes
the extra `trl`, and for wall-clock a quiet machine with two cores: a minute or more with the tiny
model, a quarter of an hour or more with SmolLM2 (`python -m examples.models.make_model smollm2`
makes it). The last line is JSON, with ratios of this project to TRL, to the higher of the two
rewards.
"""

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
from benchmarks.peers.training import ROOT, STEP_MARK, TRAININGS, WINDOW, Step, Training, summary
from vcpo.local.run_dir import RunDir
from vcpo.service.lifecycle import read_ready

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),  # of the task
}


def main() -> None:
    """Train three times, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(TRAININGS), default="tiny")
    parser.add_argument("--steps", type=int, help="of each training [90 tiny, 30 smollm2]")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    training = TRAININGS[options.model]
    num_steps = training.steps if options.steps is None else options.steps
    if not training.model.is_dir():
        fix = f"python -m examples.models.make_model {options.model}"
        parser.error(f"--model: {training.model} is not there; make it: {fix}")
    if num_steps < WINDOW:
        parser.error(f"--steps: at least {WINDOW}, over which a reward is a mean; got {num_steps}")
    os.environ.update(_ENVIRONMENT)
    on_policy = {"method": "grpo", "maxPolicyLagSteps": 0}
    ahead = {"maxPolicyLagSteps": training.lag}
    sides: dict[str, dict[str, Any]] = {}

    def judge(name: str, steps: Iterator[Step]) -> None:
        taken: list[Step] = []
        for step in steps:
            taken.append(step)
            place = f"{name} {len(taken)}/{num_steps}"
            print(f"{place}: reward {step.reward:.3f}, {step.seconds:.0f} s", file=sys.stderr)
        sides[name] = summary(taken, training.rewards)
        print(f"{name}: {json.dumps(sides[name])}", flush=True)

    judge("trl", trl_side(options.model, num_steps, options.seed))
    ways = {"on_policy": (on_policy, 1), "asynchronous": (ahead, training.workers)}
    for name, (algorithm, workers) in ways.items():
        document = _document(training, num_steps, options.seed, algorithm, workers)
        judge(name, our_side(document, workers))
    print(json.dumps(comparison(sides, training.rewards[-1])))


def comparison(sides: Mapping[str, Mapping[str, Any]], reward: float) -> dict[str, float | None]:
    """Return ratios of this project to TRL; None where a side did not reach the reward."""
    trl, ours, free = (sides[name] for name in ("trl", "on_policy", "asynchronous"))

    def ratio(side: Mapping[str, Any], key: str) -> float | None:
        mine, theirs = side[f"to_{reward:g}"][key], trl[f"to_{reward:g}"][key]
        return round(mine / theirs, 3) if mine and theirs else None

    per_step = ours["cpu_seconds_per_step"] / trl["cpu_seconds_per_step"]
    return {
        "steps_ratio": ratio(ours, "steps"),
        "cpu_seconds_ratio": ratio(ours, "cpu_seconds"),
        "cpu_seconds_per_step_ratio": round(per_step, 3),
        "wall_ratio_async": ratio(free, "seconds"),
        "final_reward_difference": round(free["final_reward"] - trl["final_reward"], 3),
    }


def trl_side(model: str, num_steps: int, seed: int) -> Iterator[Step]:
    """Train with TRL in a process of its own; yield its steps."""
    module = [sys.executable, "-m", "benchmarks.peers.trl_side"]
    command = [*module, model, str(num_steps), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own
        for line in process.stdout or ():
            if line.startswith(STEP_MARK):
                yield Step(**json.loads(line.removeprefix(STEP_MARK)))
    if process.returncode:
        raise SystemExit(f"TRL's side ended with exit status {process.returncode}: see above")


def our_side(document: Mapping[str, Any], workers: int) -> Iterator[Step]:
    """Train with `vcpo run`; yield its steps, with the clocks of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder) / "run.yaml", Path(folder) / "run"
        file.write_text(json.dumps(document), encoding="utf-8")
        first_s = first_cpu_s = 0.0
        with vcpo.train(file, run_dir=run_dir) as training:
            for number, record in enumerate(training):
                at_s, cpu_s = time.monotonic(), sum(_cpu_seconds(run_dir))
                if number == 0:
                    first_s, first_cpu_s = at_s, cpu_s
                workers_gib = record.worker_peak_gibibytes * workers
                yield Step(
                    reward=record.reward_mean,
                    seconds=at_s - first_s,
                    cpu_seconds=cpu_s - first_cpu_s,
                    peak_gibibytes=record.learner_peak_gibibytes + workers_gib,
                )


def _document(
    training: Training, num_steps: int, seed: int, algorithm: Mapping[str, Any], workers: int
) -> dict[str, Any]:
    """Return a run of this training."""
    ours = {"threads": 1, "precision": "bfloat16" if training.is_bfloat16 else "float32"}
    places = training.prompts * training.responses
    replicas = {"minReplicas": workers, "maxReplicas": workers}
    groups = {"promptsPerStep": training.prompts, "trajectoriesPerPrompt": training.responses}
    spec = {
        "seed": seed,
        "steps": num_steps,
        "model": {"name": str(training.model)},
        "environment": {"name": training.task, "parameters": training.parameters},
        "batch": groups,
        "sampling": {"maxNewTokens": training.new_tokens},
        "algorithm": algorithm,
        "optimizer": {"learningRate": training.rate},
        "evaluation": {"everySteps": 10_000, "prompts": 16},
        "checkpoint": {"everySteps": 10_000},
        "control": {"pollSeconds": 0.2},
        "lease": {"timeoutSeconds": 120},
        "learner": ours,
        "rollouts": [{"name": "main", "maxConcurrentSequences": places, **replicas, **ours}],
    }
    return {"metadata": {"name": "peers"}, "spec": spec}


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
