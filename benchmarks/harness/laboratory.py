"""A policy that a benchmark trains, with every version kept, to measure its gradients."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from research.cells.sampling import Sampler
from research.cells.versions import Version
from research.study import cell_spec, load_study, model_directory
from vcpo.algo.baseline import GradientNormEstimator
from vcpo.api import load_run
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.record import BatchRecord, batch_record
from vcpo_learner.estimator.token_weights import token_weights
from vcpo_learner.forward.forward_pass import forward_pass
from vcpo_learner.forward.logprobs import token_logprobs
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.model.loading import load_policy, pad_token_id, policy_tensors
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_rollout.environments import Split, make_environment

WEIGHT_CAP = 8.0
"""Truncation of the sequence weights in the gradient, that of VCPO."""


class Laboratory:
    """A trained policy, its earlier versions, and gradients of the newest on older samples."""

    def __init__(
        self,
        study_file: Path,
        *,
        lag: int,
        learning_rate: float,
        seed: int,
        task_file: Path | None = None,
    ) -> None:
        """Start with the model of a study; `task_file` is a run whose task replaces the study's."""
        study = load_study(study_file)
        model_name = model_directory(study, study_file)
        method = study.spec.method(study.spec.subject)
        self._lag = lag
        self._spec = cell_spec(study.spec, method, lag=lag, learning_rate=learning_rate, seed=seed)
        if task_file is not None:
            run = load_run(task_file).spec
            own = {"environment": run.environment, "sampling": run.sampling}
            self._spec = self._spec.model_copy(update=own)
        torch.manual_seed(seed)
        self._model, tokenizer = load_policy(model_name, self._spec.model.revision)
        self._pad = pad_token_id(tokenizer)
        self._sampler = Sampler(self._spec, model_name, tokenizer, self._pad)
        task = self._spec.environment
        self._environment = make_environment(task.name, task.parameters, seed)
        self._versions = [Version(number=0, weights=policy_tensors(self._model))]

    def train(self, steps: int) -> None:
        """Take steps on batches of the training lag and keep every version."""
        update = PolicyUpdate(self._model, self._spec, self._pad)
        prompts = self._spec.batch.prompts_per_step
        for step in range(steps):
            groups = self.sample(min(self._lag, step), range(step * prompts, (step + 1) * prompts))
            result = update.step(groups, policy_version=step)
            self._versions.append(Version(number=step + 1, weights=policy_tensors(self._model)))
            if step % 32 == 31 or step == steps - 1:
                print(f"step {step + 1}: mean reward {result.reward_mean:.2f}", flush=True)

    def sample_new(self, lag: int, num_groups: int) -> list[list[Trajectory]]:
        """Sample groups of prompts that were not trained on, the same prompts for every lag."""
        first = len(self._versions) * self._spec.batch.prompts_per_step
        return self.sample(lag, range(first, first + num_groups))

    def sample(self, lag: int, indices: Sequence[int]) -> list[list[Trajectory]]:
        """Sample one group for each prompt with the version `lag` steps before the newest."""
        self._sampler.use(self._versions[-1 - lag])
        return self._sampler.groups(
            self._environment,
            self._sampler.prompts(self._environment, Split.TRAIN, indices),
            samples=self._spec.batch.trajectories_per_prompt,
            temperature=self._spec.sampling.temperature,
        )

    def squared_norms(
        self, group: Sequence[Trajectory], estimator: GradientNormEstimator
    ) -> list[float]:
        """Return an estimator's ||h_i||^2 of one group under the newest version."""
        batch = token_batch(group, self._pad, torch.device("cpu"))
        network = PolicyNetwork.of(self._model)
        temperature = self._spec.sampling.temperature
        forward = forward_pass(
            network, Slots(self._model), batch, estimator, temperature=temperature
        )
        record = self._record(group, batch.select_trained(forward.logprobs.detach()))
        weights = token_weights(record, self._spec.algorithm.loss_config)
        norms: list[float] = forward.measure(batch.place_trained(weights)).squared_norms.tolist()
        return norms

    def log_weights(self, group: Sequence[Trajectory]) -> list[float]:
        """Return one group's untruncated log importance weights, nats, under the newest version."""
        batch = token_batch(group, self._pad, torch.device("cpu"))
        with torch.no_grad():
            logprobs = token_logprobs(
                self._model, batch, temperature=self._spec.sampling.temperature
            )
        log_weights: list[float] = (
            self._record(group, batch.select_trained(logprobs)).log_weights().tolist()
        )
        return log_weights

    def _record(self, group: Sequence[Trajectory], logprobs: Tensor) -> BatchRecord:
        """A group with the log-probabilities [N] of its trained tokens under the newest version."""
        record = batch_record(
            group,
            longest_response=self._spec.sampling.max_new_tokens,
            device=logprobs.device,
            dtype=logprobs.dtype,
        )
        record.learner_logprobs.copy_(logprobs)
        return record
