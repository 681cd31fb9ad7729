"""Accuracies of a run's checkpoints on held-out prompts, measured after the run."""

from __future__ import annotations

from typing import Final

from research.cells.sampling import Sampler
from research.cells.versions import Version
from vcpo.api import VCPORun
from vcpo.local.run_dir import RunDir
from vcpo_learner.checkpoints.folder import TENSORS, checkpoint_paths
from vcpo_learner.checkpoints.tensor_files import read_parameters
from vcpo_learner.model.loading import load_policy, pad_token_id, policy_tensors
from vcpo_rollout.environments import Environment, Split

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
