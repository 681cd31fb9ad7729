"""What is learned and how: algorithm, batch, sampling, optimizer, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import InitErrorDetails

from vcpo.algo import (
    LOSS_CONFIGS,
    Aggregation,
    Baseline,
    BaselineScope,
    Clipping,
    EssKind,
    GradientNormEstimator,
    GroupFilter,
    KLPenalty,
    LearningRateRule,
    LossConfig,
    Method,
    StepLimits,
    Weight,
)
from vcpo.spec.fields import Ratio, Section, Steps, conflict, refuse

BASELINES_OF_BATCHES: Final = (Baseline.OPOB, Baseline.PUBLISHED, Baseline.GROUP_MEAN)
"""Baselines that may be taken over a whole batch."""

NORM_BASELINES: Final = (Baseline.OPOB, Baseline.PUBLISHED)
"""Baselines that weigh trajectories by the norm of their gradient."""


class Algorithm(Section):
    """How a batch becomes a step; the defaults are VCPO (arXiv 2602.17616).

    `method` fixes every stage by one word. A field that is None takes the method's own value; a
    field that is given replaces it.
    """

    method: Method = Method.VCPO
    """The estimator of the gradient, by name; `docs/methods.md` says when to use which."""
    max_policy_lag_steps: Annotated[int, Field(ge=0, le=1024)] = 8
    """Oldest token that may enter an update, in policy versions; 0 is synchronous training."""
    baseline: Baseline | None = None
    """What is subtracted from rewards; of `vcpo` the minimum-variance off-policy baseline."""
    baseline_scope: BaselineScope = BaselineScope.GROUP
    """One baseline per prompt group, or one for the whole batch."""
    gradient_norms: GradientNormEstimator = GradientNormEstimator.EXACT
    """How the baseline gets each trajectory's gradient norm: `exact` measures it, in dense models;
    the others estimate it for less. Use `logitEnergy` for a mixture of experts."""
    importance_weight_cap: Annotated[float, Field(ge=1.0, le=1e6)] | None = None
    """Importance weights above this are truncated, or dropped by methods that mask (never in the
    ESS); 8 for `vcpo`."""
    importance_weight_floor: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Importance weights below this count 0."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Width of the trust region below a ratio of 1, of methods that clip."""
    clip_high: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Width of the trust region above a ratio of 1, of methods that clip."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1e6)] | None = None
    """Ratio above which a negative advantage gives no gradient, of methods that clip."""
    threshold: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """The mask's number: tau of M2PO, delta of OPSM, tau_p of STAPO, the share of BAPO."""
    regularization: Annotated[float, Field(gt=0.0, le=1e3)] | None = None
    """Pull toward the reference or the sampler: beta of TBA and AGRO, tau of Kimi."""
    on_policy_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of each group that is drawn from the newest answers to its prompt, the rest from all
    earlier ones by their reward (TBA, AGRO); None trains on what arrived."""
    aggregation: Aggregation | None = None
    """What tokens and trajectories count against each other."""
    overlong_share: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Last part of `sampling.maxNewTokens` over which the reward falls by 1, linearly."""
    group_filter: GroupFilter | None = None
    """Whether groups whose rewards are all equal are dropped and others waited for."""
    learning_rate_rule: LearningRateRule | None = None
    """How the step shrinks with the ESS ratio: `sqrt` suits AdamW, `linear` SGD, `none` is off."""
    on_policy_ess_ratio: Ratio | None = None
    """ESS ratio of whole trajectories at lag 0, where train/rollout mismatch alone acts. A number
    is taken as it is, without a dead band; None measures it on fresh tokens, all through the
    run."""
    ess_kind: EssKind = EssKind.AUTO
    """What the ESS is taken over: whole trajectories as long as their ratio says something, then
    blocks of them (`auto`), or always one kind."""
    dead_band: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Part of the on-policy ESS ratio that may be missing before the step shrinks; 0 is the rule as
    published. None allows what chance takes from an on-policy batch of this size."""
    refuse_below: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of the on-policy ESS ratio below which a step is not taken at all; 0 takes every one."""
    refuse_kl_above: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """KL divergence from sampler to learner, nats per token, above which a step is not taken."""

    @property
    def loss_config(self) -> LossConfig:
        """The method's stages, with what this section replaces."""
        given = {
            name: value
            for field, name in _REPLACES.items()
            if (value := getattr(self, field)) is not None
        }
        return replace(LOSS_CONFIGS[self.method], **given)

    @property
    def step_limits(self) -> StepLimits:
        """What a batch must be like for a step, and for a whole one."""
        return StepLimits(
            rule=self.loss_config.learning_rate_rule,
            dead_band=self.dead_band,
            refuse_below=self.refuse_below,
            refuse_kl_above=math.inf if self.refuse_kl_above is None else self.refuse_kl_above,
        )

    @model_validator(mode="after")
    def _fields_suit_method(self) -> Self:
        refuse(
            [
                *self._foreign_fields(),
                *self._foreign_baseline(),
                *self._foreign_scope(),
                *self._foreign_norms(),
                *self._foreign_kind(),
            ]
        )
        return self

    def _foreign_kind(self) -> Iterator[InitErrorDetails]:
        config = self.loss_config
        has_norms = config.baseline in NORM_BASELINES and config.weight is Weight.SEQUENCE
        if self.ess_kind is EssKind.ENERGY and not has_norms:
            message = "needs the gradient norms of method 'vcpo' with baseline 'opob'"
            yield conflict("essKind", value=str(self.ess_kind), message=message)

    def _foreign_fields(self) -> Iterator[InitErrorDetails]:
        own = LOSS_CONFIGS[self.method]
        for field, is_used in _USED_BY.items():
            value = getattr(self, field)
            if value is not None and not is_used(own):
                having = ", ".join(
                    f"'{name}'" for name, each in LOSS_CONFIGS.items() if is_used(each)
                )
                message = f"method '{self.method}' has no use for it; remove it or use {having}"
                yield conflict(to_camel(field), value=value, message=message)

    def _foreign_baseline(self) -> Iterator[InitErrorDetails]:
        own = LOSS_CONFIGS[self.method]
        fixed = own.has_critic or own.kl_penalty is not KLPenalty.NONE
        if self.baseline is not None and fixed and self.baseline is not own.baseline:
            message = f"method '{self.method}' is defined with '{own.baseline}'; remove it"
            yield conflict("baseline", value=str(self.baseline), message=message)

    def _foreign_scope(self) -> Iterator[InitErrorDetails]:
        baseline = self.loss_config.baseline
        if self.baseline_scope is BaselineScope.BATCH and baseline not in BASELINES_OF_BATCHES:
            allowed = ", ".join(sorted(f"'{name}'" for name in BASELINES_OF_BATCHES))
            message = f"'batch' needs a `baseline` of {allowed}, not '{baseline}'"
            yield conflict("baselineScope", value=str(self.baseline_scope), message=message)

    def _foreign_norms(self) -> Iterator[InitErrorDetails]:
        baseline, estimator = self.loss_config.baseline, self.gradient_norms
        if estimator is not GradientNormEstimator.EXACT and baseline not in NORM_BASELINES:
            allowed = ", ".join(f"'{name}'" for name in NORM_BASELINES)
            message = f"nothing asks for norms with '{baseline}'; give a `baseline` of {allowed}"
            yield conflict("gradientNorms", value=str(estimator), message=message)


_REPLACES: Final = MappingProxyType(
    {
        "baseline": "baseline",
        "importance_weight_cap": "weight_cap",
        "importance_weight_floor": "weight_floor",
        "clip_low": "clip_low",
        "clip_high": "clip_high",
        "dual_clip": "dual_clip",
        "threshold": "threshold",
        "regularization": "kl_coefficient",
        "aggregation": "aggregation",
        "overlong_share": "overlong_share",
        "group_filter": "group_filter",
        "learning_rate_rule": "learning_rate_rule",
    }
)
"""Which number of the `LossConfig` a field replaces."""

_FIXED_BANDS: Final = (
    Clipping.CLIP,
    Clipping.PROXIMAL_CLIP,
    Clipping.OFF_POLICY_MASK,
    Clipping.SPURIOUS,
)
"""Clippings whose band is a setting."""

_USED_BY: Final[Mapping[str, Callable[[LossConfig], bool]]] = MappingProxyType(
    {
        "importance_weight_cap": lambda config: config.weight is not Weight.NONE,
        "importance_weight_floor": lambda config: config.weight is not Weight.NONE,
        "clip_low": lambda config: config.clipping in _FIXED_BANDS,
        "clip_high": lambda config: config.clipping in _FIXED_BANDS,
        "dual_clip": lambda config: config.clipping not in (Clipping.OPEN, Clipping.TAPERED),
        "threshold": lambda config: config.threshold > 0.0,
        "regularization": lambda config: config.kl_coefficient > 0.0,
        "on_policy_probability": lambda config: config.kl_penalty is KLPenalty.REFERENCE,
    }
)
"""Which configurations read a field; the others refuse it."""


class PromptSelection(StrEnum):
    """Which prompt is granted next."""

    SEQUENTIAL = "sequential"
    """The next one, in the order of their indices."""
    POSTERIOR = "posterior"
    """The most undecided of a few, by what is known of each prompt's successes."""
    TEACHER = "teacher"
    """The most undecided of a few, by a small network that reads the prompt."""


class RowLayout(StrEnum):
    """How trajectories are put into the rows of a forward pass."""

    PADDED = "padded"
    """One to a row, filled up to the longest."""
    PACKED = "packed"
    """Short ones together in rows as long as the longest, where that saves rows; for models that
    keep the trajectories of a row apart, which is tried out at the start."""


class Batch(Section):
    """One optimizer step's data: prompts times trajectories per prompt."""

    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Prompt groups consumed by one optimizer step."""
    trajectories_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 8
    """Trajectories sampled for each prompt; baselines per group want at least 2."""
    micro_batch_trajectories: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Trajectories in one forward pass; lower it when the learner runs out of memory. The update
    does not depend on it."""
    row_layout: RowLayout = RowLayout.PADDED
    """How trajectories are put into rows; the update does not depend on it."""
    over_provision_ratio: Annotated[float, Field(ge=1.0, le=8.0)] = 1.0
    """Trajectories under way for the next batch, as a multiple of it, beside those for the batches
    that `maxPolicyLagSteps` lets run ahead; when a step's batch is complete the surplus is cut,
    kept, and gone on with later."""
    prompt_pool: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Training prompts to draw from, the first of the environment; None goes on to new ones for
    ever."""
    prompt_selection: PromptSelection = PromptSelection.SEQUENTIAL
    """Which prompt comes next: one after another, round and round in a pool, or the most undecided
    (`posterior`, `teacher`), for rewards between 0 and 1."""

    @model_validator(mode="after")
    def _selection_has_a_pool(self) -> Self:
        if self.prompt_selection is not PromptSelection.SEQUENTIAL and self.prompt_pool is None:
            message = "chooses among `promptPool` prompts; give their number or use 'sequential'"
            value = str(self.prompt_selection)
            refuse([conflict("promptSelection", value=value, message=message)])
        return self

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

    def room_problem(self, context_tokens: int | None) -> str | None:
        """Why a model that reads so many tokens cannot answer a prompt; None when it can."""
        if context_tokens is None or self.max_new_tokens < context_tokens:
            return None
        return (
            f"leaves no room for a prompt: the model reads {context_tokens} tokens, prompt and"
            f" response together; give less than {context_tokens}"
        )


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
