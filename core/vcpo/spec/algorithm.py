"""What is learned and how: algorithm, batch, sampling, optimizer, evaluation."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from vcpo.algo import Baseline, BaselineScope, LearningRateRule
from vcpo.spec.fields import Ratio, Section, Steps, conflict, refuse

BASELINES_OF_BATCHES: Final = (Baseline.OPOB, Baseline.PUBLISHED, Baseline.GROUP_MEAN)
"""Baselines that may be taken over a whole batch."""


class Algorithm(Section):
    """Variance control of the off-policy update (arXiv 2602.17616); the defaults are VCPO."""

    max_policy_lag_steps: Annotated[int, Field(ge=0, le=1024)] = 8
    """Oldest token that may enter an update, in policy versions; 0 is synchronous training."""
    baseline: Baseline = Baseline.OPOB
    """What is subtracted from rewards: the minimum-variance off-policy baseline by default."""
    baseline_scope: BaselineScope = BaselineScope.GROUP
    """One baseline per prompt group, or one for the whole batch."""
    importance_weight_cap: Annotated[float, Field(ge=1.0, le=1e6)] = 8.0
    """Sequence importance weights above this are truncated in the gradient (never in the ESS)."""
    learning_rate_rule: LearningRateRule = LearningRateRule.SQRT
    """How the step shrinks with the ESS ratio: `sqrt` suits AdamW, `linear` SGD, `none` is off."""
    on_policy_ess_ratio: Ratio | None = None
    """ESS ratio at lag 0, where train/rollout mismatch alone acts; None measures it on fresh
    trajectories."""

    @model_validator(mode="after")
    def _scope_suits_baseline(self) -> Self:
        if self.baseline_scope is BaselineScope.BATCH and self.baseline not in BASELINES_OF_BATCHES:
            allowed = ", ".join(sorted(f"'{name}'" for name in BASELINES_OF_BATCHES))
            message = f"'batch' needs a `baseline` of {allowed}, not '{self.baseline}'"
            refuse([conflict("baselineScope", value=str(self.baseline_scope), message=message)])
        return self


class Batch(Section):
    """One optimizer step's data: prompts times trajectories per prompt."""

    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Prompt groups consumed by one optimizer step."""
    trajectories_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 8
    """Trajectories sampled for each prompt; baselines per group want at least 2."""
    micro_batch_trajectories: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Trajectories in one forward pass; lower it when the learner runs out of memory. The update
    does not depend on it."""

    @property
    def trajectories(self) -> int:
        """Trajectories consumed by one optimizer step (B of the paper)."""
        return self.prompts_per_step * self.trajectories_per_prompt


class Sampling(Section):
    """How rollouts are drawn from the policy."""

    temperature: Annotated[float, Field(ge=0.05, le=5.0)] = 1.0
    """Softmax temperature; the learner scores tokens at the same temperature."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 1024
    """Longest answer; a longer one is cut and judged as it stands."""


class Optimizer(Section):
    """AdamW; the learning rate here is the base that the ESS rule scales."""

    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    """Base learning rate, reached after the warm-up and constant from then on."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps over which the base learning rate rises linearly from zero."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0.0, le=1e-2)] = 1e-8
    """Added to the root of the second moment."""
    max_gradient_norm: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    """The whole gradient is scaled down to this L2 norm when it is longer."""


class Evaluation(Section):
    """Accuracy on held-out prompts, sampled by the rollout workers."""

    every_steps: Steps = 25
    """Optimizer steps between evaluations; there is always one at the start and one at the end."""
    prompts: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Held-out prompts; the same ones every time."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Answers sampled for each held-out prompt."""
    temperature: Annotated[float, Field(ge=0.05, le=5.0)] = 1.0
    """Softmax temperature of the evaluation's samples."""
