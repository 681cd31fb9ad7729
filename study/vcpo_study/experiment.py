"""One cell: the learner's update and the engine's decoding, in step, with the lag held exactly.

    step s:   sample a batch with version max(0, s - k)   ->   update version s to s + 1

Version n is the parameters after n steps. The last k + 1 versions are kept; the oldest of them
samples. So every batch is exactly k versions old from step k on, and what a run with the same
settings would do by chance of timing, a cell does by construction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from transformers.utils.logging import disable_progress_bar

from vcpo_learner.policy_model import load_policy, pad_token_id, policy_tensors
from vcpo_learner.update import PolicyUpdate, UpdateResult
from vcpo_rollout.environments import Split, make_environment
from vcpo_study.cell import Cell
from vcpo_study.records import CellRecord, EvaluationRow, StepRow
from vcpo_study.sampling import Sampler
from vcpo_study.versions import Versions

_LARGEST_LOG_WEIGHT = 20.0
"""A larger one would make the estimate of a divergence a matter of one trajectory."""


def run_cell(cell: Cell, model_name: str) -> CellRecord:
    """Train and evaluate one cell in this thread.

    model_name: where the cell's model lies on this machine.
    Raises: ValueError for a model or environment that cannot be had; EngineError when the policy's
    logits are not numbers any more.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call] # the library does not type it
    started_s = time.process_time()
    experiment = Experiment(cell, model_name)
    steps, evaluations = experiment.run()
    return CellRecord(
        method=cell.method,
        lag=cell.lag,
        learning_rate=cell.learning_rate,
        seed=cell.seed,
        digest=cell.digest,
        cpu_s=round(time.process_time() - started_s, 2),
        steps=tuple(steps),
        evaluations=tuple(evaluations),
    )


class Experiment:
    """A learner, a sampler and the versions between them."""

    def __init__(self, cell: Cell, model_name: str) -> None:
        self._spec = cell.spec
        torch.manual_seed(cell.seed)
        self._model, tokenizer = load_policy(model_name, cell.spec.model.revision)
        pad = pad_token_id(tokenizer)
        self._update = PolicyUpdate(self._model, cell.spec, pad)
        self._sampler = Sampler(cell.spec, model_name, tokenizer, pad)
        task = cell.spec.environment
        self._training_task = make_environment(task.name, task.parameters, cell.seed)
        self._held_out_task = make_environment(task.name, task.parameters, cell.evaluation_seed)
        self._versions = Versions(cell.lag)

    def run(self) -> tuple[list[StepRow], list[EvaluationRow]]:
        """Take every step; evaluate at the start, every so many steps, and at the end."""
        every, last = self._spec.evaluation.every_steps, self._spec.steps
        steps: list[StepRow] = []
        evaluations: list[EvaluationRow] = []
        for version in range(last + 1):
            self._versions.add(policy_tensors(self._model))
            if version % every == 0 or version == last:
                evaluations.append(self._evaluate(version))
            if version < last:
                steps.append(self._step(version))
        return steps, evaluations

    def _step(self, version: int) -> StepRow:
        self._sampler.use(self._versions.sampling)
        batch = self._spec.batch
        first = version * batch.prompts_per_step
        groups = self._sampler.groups(
            self._training_task,
            Split.TRAIN,
            range(first, first + batch.prompts_per_step),
            samples=batch.trajectories_per_prompt,
            temperature=self._spec.sampling.temperature,
        )
        result = self._update.step(groups, policy_version=version)
        num_tokens = sum(len(each.response_token_ids) for group in groups for each in group)
        return _step_row(version + 1, result, kl_per_token(result.log_weights, num_tokens))

    def _evaluate(self, version: int) -> EvaluationRow:
        self._sampler.use(self._versions.newest)
        settings = self._spec.evaluation
        groups = self._sampler.groups(
            self._held_out_task,
            Split.EVALUATION,
            range(settings.prompts),
            samples=settings.samples_per_prompt,
            temperature=settings.temperature,
        )
        rewards = [each.reward for group in groups for each in group]
        return EvaluationRow(step=version, accuracy=sum(rewards) / len(rewards))


def kl_per_token(log_weights: Sequence[float], num_tokens: int) -> float | None:
    """KL(sampler || learner) in nats per token, estimated as sum_i (w_i - 1 - log w_i) / tokens.

    log_weights: [B] nats, untruncated; empty when one has no value, which gives None. They are held
    within +-20. The estimate is at least 0 and unbiased, since the mean of w is 1.
    Source: Schulman, http://joschu.net/blog/kl-approx.html (k3), taken over whole trajectories.
    """
    if not log_weights:
        return None
    reach = _LARGEST_LOG_WEIGHT
    held = [min(max(log_weight, -reach), reach) for log_weight in log_weights]
    return math.fsum(math.expm1(x) - x for x in held) / num_tokens


def _step_row(step: int, result: UpdateResult, divergence: float | None) -> StepRow:
    return StepRow(
        step=step,
        reward_mean=result.reward_mean,
        ess_ratio=result.ess_ratio,
        on_policy_ess_ratio=result.on_policy_ess_ratio,
        kl_per_token=divergence,
        importance_weight_max=result.importance_weight_max,
        gradient_norm=result.gradient_norm,
        learning_rate=result.learning_rate,
        learning_rate_scale=result.learning_rate_scale,
        skipped=None if result.skipped is None else str(result.skipped),
    )
