"""One run of `vcpo run`'s host with paced workers and a paced learner."""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.async_speedup.hardware import GROUP_SIZE, GROUPS, Hardware
from benchmarks.async_speedup.paced_learner import (
    PUBLICATION_SECONDS_VARIABLE,
    STEP_SECONDS_VARIABLE,
)
from research.cells.sampling import Sampler
from research.cells.versions import Version, policy_tensors
from vcpo.api import VCPORun
from vcpo.local.host import LOOPBACK, Host, HostOptions
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.summary import Ending
from vcpo.local.terminal.view import PlainView
from vcpo.metrics import HostMetrics, serve_metrics
from vcpo.records.journal import Metrics, read_metrics
from vcpo_learner.checkpoints.folder import TENSORS, checkpoint_paths
from vcpo_learner.checkpoints.tensor_files import read_parameters
from vcpo_learner.model.loading import load_policy, pad_token_id
from vcpo_rollout.environments import Environment, Split, make_environment

_MODEL: Final = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny"
_TASK: Final = "sort_digits"
_PARAMETERS: Final = {"digits": 5, "style": "plain"}
_CHECKPOINT_STEPS: Final = 8
_LEARNER: Final = "benchmarks.async_speedup.paced_learner"
_LINES_EVERY_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What distinguishes the runs."""

    lag: int
    """Largest lag of a token, in policy versions; 0 is synchronous training."""
    workers: int
    steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run that took all its steps."""

    setting: Setting
    metrics: Metrics
    accuracies: Mapping[int, float]
    """On held-out prompts, by step; of the first model and every checkpoint, the last included."""


class TrialFailedError(RuntimeError):
    """A run ended before its last step."""


def run_trial(setting: Setting, hardware: Hardware, folder: Path, *, prompts: int) -> Trial:
    """Train as `train` does, and then judge the checkpoints.

    prompts: held-out prompts for each accuracy.
    """
    run, metrics = train(setting, hardware, folder)
    task = make_environment(_TASK, _PARAMETERS, setting.seed)
    return Trial(
        setting=setting,
        metrics=metrics,
        accuracies=accuracy_by_step(run, RunDir(folder), task, prompts),
    )


def train(setting: Setting, hardware: Hardware, folder: Path) -> tuple[VCPORun, Metrics]:
    """Train in a new run directory; return the run and its journal.

    It changes the environment variables of this process, which those of the run inherit.

    Raises: TrialFailedError with the host's message, or if the folder holds a run.
    """
    run_dir = RunDir(folder)
    if run_dir.is_used:
        raise TrialFailedError(f"{folder} holds a run: remove it, or name another --folder")
    run = make_run(setting, hardware, workers_folder=run_dir.path / "workers")
    run_dir.create(run)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),  # for this package
        STEP_SECONDS_VARIABLE: str(hardware.learner_step_s),
        PUBLICATION_SECONDS_VARIABLE: str(hardware.publication_s),
    }
    metrics = HostMetrics()
    with (
        serve_metrics(metrics.registry, LOOPBACK, 0) as server,
        PlainView(Console(), interval_s=_LINES_EVERY_S) as view,
    ):
        options = HostOptions(
            resume=False, metrics=metrics, metrics_port=server.port, learner_module=_LEARNER
        )
        outcome = asyncio.run(Host(run, run_dir, view, options).run())
    if outcome.ending not in (Ending.COMPLETE, Ending.COLLAPSED):
        raise TrialFailedError(f"{folder}: {outcome.ending.name.lower()}. {outcome.message}")
    return run, read_metrics(folder)


def make_run(setting: Setting, hardware: Hardware, *, workers_folder: Path) -> VCPORun:
    """Return the run of a setting; every field that is not named has its default."""
    task = {
        "task": _TASK,
        "parameters": _PARAMETERS,
        "lengths": dataclasses.asdict(hardware.lengths),
        "decoding_step_s": hardware.decoding_step_s,
        "workers_folder": str(workers_folder),
        "workers": setting.workers,
    }
    places, workers = hardware.worker_groups * GROUP_SIZE, setting.workers
    replicas = {"minReplicas": workers, "maxReplicas": workers}
    groups = {"promptsPerStep": GROUPS, "trajectoriesPerPrompt": GROUP_SIZE}
    spec = {
        "model": {"name": str(_MODEL)},
        "environment": {
            "name": "benchmarks.async_speedup.paced_task:PacedTask",
            "parameters": task,
        },
        "seed": setting.seed,
        "steps": setting.steps,
        "batch": {**groups, "microBatchTrajectories": GROUPS * GROUP_SIZE},
        "sampling": {"maxNewTokens": 6},
        "algorithm": {"maxPolicyLagSteps": setting.lag},
        "optimizer": {"learningRate": 1e-4, "schedule": "linear"},
        # Evaluations before the first step, which occupies every worker, and after the last;
        # checkpoints are judged later.
        "evaluation": {"everySteps": setting.steps, "prompts": workers * places},
        "checkpoint": {"everySteps": _CHECKPOINT_STEPS, "keep": 1000},
        "learner": {"threads": 1},
        "control": {"pollSeconds": 1},
        "rollouts": [{"name": "main", "maxConcurrentSequences": places, "threads": 1, **replicas}],
    }
    name = f"lag-{setting.lag}-workers-{workers}"
    return VCPORun.model_validate({"metadata": {"name": name}, "spec": spec})


_TEMPERATURE: Final = 1.0


def accuracy_by_step(
    run: VCPORun, run_dir: RunDir, task: Environment, prompts: int
) -> dict[int, float]:
    """Return the accuracy of the model that the run began with, and of each of its checkpoints.

    An accuracy is the mean reward of one response to each of the first held-out prompts.
    """
    model, tokenizer = load_policy(run.spec.model.name, run.spec.model.revision)
    sampler = Sampler(run.spec, run.spec.model.name, tokenizer, pad_token_id(tokenizer))
    held_out = sampler.prompts(task, Split.EVALUATION, range(prompts))
    folders = checkpoint_paths(run_dir.path / "checkpoints")
    found: dict[int, float] = {}
    for step in (0, *sorted(folders)):
        if step > 0:
            read_parameters(folders[step] / TENSORS, dict(model.named_parameters()))
        sampler.use(Version(number=step, weights=policy_tensors(model)))
        groups = sampler.groups(task, held_out, samples=1, temperature=_TEMPERATURE)
        found[step] = sum(group[0].reward for group in groups) / prompts
    return found
