"""Sections of a run that set what is learned and how: algorithm, batch, optimizer, evaluation."""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import InitErrorDetails

from vcpo.algo.advantage import BATCH_BASELINES, BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.trust_region import TARGET_ESS_RATIO, TrustRegion, horizon_of_lag
from vcpo.algo.ess.unit import EssKind
from vcpo.algo.ess.verdict import LearningRateRule, StepLimits
from vcpo.algo.methods import LOSS_CONFIGS, SETTINGS, Aggregation, KLPenalty, LossConfig, Method
from vcpo.api.fields import (
    Ratio,
    Section,
    Steps,
    StopString,
    Text,
    conflict,
    is_import_path,
    refuse,
)

_Setting = Annotated[float, Field(ge=0.0, le=1e6)]

NORM_BASELINES: Final = (Baseline.OPOB, Baseline.PESSIMISTIC)
"""Baselines that weigh trajectories by the norm of their gradient."""


class Algorithm(Section):
    """How a batch becomes an optimizer step.

    The default is VCPO (arXiv 2602.17616) with three departures (docs/inside/mathematics.md):
    one baseline for the batch, which is pessimistic about what stale data does not show, and a
    trust region in place of its learning-rate rule.

    `method` sets every stage. A field that is unset takes the method's own value; a field that is
    set replaces it.
    """

    method: Method = Method.VCPO2
    """Method that turns a batch into a gradient: `vcpo2`, `vcpo`, `sequenceTis`, `grpo`, `dapo`,
    `gspo`, `cispo`, or another of `docs/methods.md`, which says when to use which."""
    max_policy_lag_steps: Annotated[int, Field(ge=0, le=1024)] = 8
    """Largest lag of a token that an update may use, in policy versions. 0 is synchronous training.
    Raise it if the learner waits for data; lower it if the ESS ratio stays low."""
    loss: Annotated[Text, Field(max_length=256)] | None = None
    """Your own loss, `package.module:function`: it computes the coefficient of every token from the
    batch (`docs/methods.md`). Everything else follows `method`. If unset, the method's own."""
    baseline: Annotated[Text, Field(max_length=256)] | None = None
    """Baseline that is subtracted from each reward: `opob` (minimum-variance off-policy baseline),
    `pessimistic` (`opob`, lowered toward the least reward by the part of the policy that stale data
    does not show), `groupMean`, `rloo` (mean of the other responses), `grpo` (mean, then divided by
    the deviation), `none`, or `package.module:function` for your own. If unset, the method's
    own."""
    baseline_scope: BaselineScope | None = None
    """Trajectories that a baseline is computed from: `group` (those of one prompt) or `batch` (all
    of the step). `batch` needs the baseline `opob`, `pessimistic` or `groupMean`, or your own. If
    unset, `batch` for `vcpo2` where it may be, and `group` for all others."""
    router_replay: bool = False
    """If true, workers send which experts computed each token, and the learner computes with the
    same experts. In a mixture of experts another choice changes log-probabilities by more than
    rounding does. It costs one byte for each token, layer and chosen expert."""
    settings: Annotated[dict[str, _Setting], Field(max_length=16)] = Field(default={})
    """Numbers in place of the method's own, by name, such as `{clipHigh: 0.3}`: `weightCap` and
    `weightFloor` of importance weights, `clipLow`, `clipHigh` and `dualClip` of clipping,
    `threshold` of a mask, `klCoefficient` of a KL penalty, and `overlongShare`, the last part of
    `sampling.maxNewTokens` in which the reward falls by 1 (`docs/methods.md`)."""
    on_policy_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of each group that is drawn from the newest stored responses to its prompt; the rest is
    drawn from all stored responses by their reward. Only for `tba` and `agro`; needs
    `batch.promptPool`. If unset, nothing is stored and the step trains on what arrived."""
    aggregation: Aggregation | None = None
    """How token terms are averaged into the loss: `sequenceMean`, `tokenMean`, `sequenceSum`, or
    `constant` (divided by `sampling.maxNewTokens`). If unset, the method's own."""
    learning_rate_rule: LearningRateRule | None = None
    """How the learning rate of a step follows the ESS ratio: `sqrt` (for AdamW), `linear` (for
    SGD), `trustRegion` (the largest rate at which data of `maxPolicyLagSteps` keeps
    `targetEssRatio`), or `none`. If unset, the method's own, `sqrt` for `vcpo`, `trustRegion` for
    `vcpo2` and `none` for all others."""
    target_ess_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the on-policy ESS ratio that the rule `trustRegion` keeps for data of the largest
    lag, or of 32 steps if that is more, while tokens are sure; uncertain ones may lose more. If
    unset, 0.35. Raise it if rewards fall or dip; lower it if the learning rate is scaled down while
    rewards rise steadily."""
    on_policy_ess_ratio: Ratio | None = None
    """ESS ratio of whole trajectories at lag 0, where only the mismatch of rollout and learner
    acts; the learning-rate rule divides by it. If unset, it is measured on fresh tokens during the
    whole run. Set it for the rule as published: a constant is used without a band of chance."""
    ess_kind: EssKind = EssKind.AUTO
    """Unit over which the ESS is computed: `auto` (whole trajectories while their ratio is
    informative, then blocks), `sequence`, `block` or `token`."""
    refuse_below: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Smallest ESS ratio of a step, as a share of the on-policy ratio. A step below it is skipped;
    0 skips none. Set it to protect a run from single bad batches."""

    @property
    def loss_config(self) -> LossConfig:
        """The method's stages, with what this section replaces."""
        given = {name: value for name in _STAGES if (value := getattr(self, name)) is not None}
        known = LOSS_CONFIGS[self.method].settings
        given |= {name: each for name, each in self._settings() if name in known}
        if self.baseline in frozenset(Baseline):
            given["baseline"] = Baseline(self.baseline)
        config = replace(LOSS_CONFIGS[self.method], **given)
        if self.baseline_scope is None and config.baseline not in BATCH_BASELINES:
            return replace(config, baseline_scope=BaselineScope.GROUP)
        return config

    @property
    def fits_one_pass(self) -> bool:
        """Whether a trajectory's coefficient is its reward minus a baseline, once it is scored."""
        config = self.loss_config
        return (
            config.has_fixed_shape
            and config.kl_penalty is KLPenalty.NONE
            and not config.is_whitened
        )

    @property
    def trust_region(self) -> TrustRegion | None:
        """The region at the start of a run; None under another rule."""
        if self.loss_config.learning_rate_rule is not LearningRateRule.TRUST_REGION:
            return None
        return TrustRegion(
            horizon_steps=horizon_of_lag(self.max_policy_lag_steps),
            target_ess_ratio=self.target_ess_ratio or TARGET_ESS_RATIO,
        )

    @property
    def step_limits(self) -> StepLimits:
        """The bounds within which a batch allows a step, and a step at the full rate."""
        region = self.trust_region
        return StepLimits(
            rule=self.loss_config.learning_rate_rule,
            target_ess_ratio=1.0 if region is None else region.target_ess_ratio,
            refuse_below=self.refuse_below,
        )

    @model_validator(mode="after")
    def _fields_suit_method(self) -> Self:
        refuse(
            [
                *self._setting_conflicts(),
                *self._path_conflicts(),
                *self._rule_conflicts(),
                *self._baseline_conflicts(),
            ]
        )
        return self

    def _settings(self) -> Iterator[tuple[str, float]]:
        for name, value in self.settings.items():
            yield to_snake(name), value

    def _setting_conflicts(self) -> Iterator[InitErrorDetails]:
        own = LOSS_CONFIGS[self.method]
        for name, value in self._settings():
            if name not in own.settings:
                known = ", ".join(map(to_camel, own.settings))
                message = f"method '{self.method}' does not read it; remove it or use {known}"
                yield conflict("settings", to_camel(name), value=value, message=message)
            elif not SETTINGS[name][0] <= value <= SETTINGS[name][1]:
                message = "must be from {:g} to {:g}".format(*SETTINGS[name])
                yield conflict("settings", to_camel(name), value=value, message=message)
        draws = own.kl_penalty is KLPenalty.REFERENCE
        if self.on_policy_probability is not None and not draws:
            message = f"method '{self.method}' does not use it; remove it or use 'tba', 'agro'"
            value = self.on_policy_probability
            yield conflict("onPolicyProbability", value=value, message=message)

    def _path_conflicts(self) -> Iterator[InitErrorDetails]:
        if self.loss is not None and not is_import_path(self.loss):
            message = "must be package.module:function; remove it for the loss of the method"
            yield conflict("loss", value=self.loss, message=message)
        baseline = self.loss_config.baseline
        if not isinstance(baseline, Baseline) and not is_import_path(baseline):
            known = ", ".join(Baseline)
            message = f"is unknown; use one of {known}, or package.module:function for your own"
            yield conflict("baseline", value=baseline, message=message)

    def _rule_conflicts(self) -> Iterator[InitErrorDetails]:
        if self.target_ess_ratio is not None and self.trust_region is None:
            rule = self.loss_config.learning_rate_rule
            message = f"rule '{rule}' does not use it; use learningRateRule 'trustRegion'"
            yield conflict("targetEssRatio", value=self.target_ess_ratio, message=message)

    def _baseline_conflicts(self) -> Iterator[InitErrorDetails]:
        own = LOSS_CONFIGS[self.method]
        fixed = own.has_critic or own.kl_penalty is not KLPenalty.NONE
        if self.baseline is not None and fixed and self.baseline != own.baseline:
            message = f"method '{self.method}' always uses '{own.baseline}'; remove it"
            yield conflict("baseline", value=self.baseline, message=message)
        baseline, scope = self.loss_config.baseline, self.loss_config.baseline_scope
        is_for_groups = isinstance(baseline, Baseline) and baseline not in BATCH_BASELINES
        if scope is BaselineScope.BATCH and is_for_groups:
            allowed = ", ".join(f"'{name}'" for name in BATCH_BASELINES)
            message = f"'batch' needs a `baseline` of {allowed}, not '{baseline}'"
            yield conflict("baselineScope", value=str(scope), message=message)


_STAGES: Final = ("loss", "baseline", "baseline_scope", "aggregation", "learning_rate_rule")
"""The stages of a `LossConfig` that fields of the same name replace."""


class PromptSelection(StrEnum):
    """Order in which prompts are granted."""

    SEQUENTIAL = "sequential"
    """Prompts come in the order of their indices."""
    TEACHER = "teacher"
    """The most undecided of a few, as predicted by a small network that reads the prompt."""


class RowLayout(StrEnum):
    """How trajectories are laid out in the rows of a forward pass."""

    AUTO = "auto"
    """Packed on a GPU whose kernel takes the model's rows, if the tests of the start pass."""
    PADDED = "padded"
    """One trajectory to a row, padded to the longest."""
    PACKED = "packed"
    """All trajectories of a forward pass in one row; with `learner.attention` `sdpa` several short
    ones to a row as long as the longest. The model must keep the trajectories of a row apart; the
    learner tests this at the start."""


class Batch(Section):
    """The data of one optimizer step: prompts times trajectories per prompt."""

    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Prompt groups that one optimizer step consumes. Raise it for a steadier gradient; a step then
    takes longer."""
    trajectories_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 8
    """Responses sampled for each prompt (group size). Baselines per group need at least 2. Raise it
    if the rewards of many groups are all equal, since those teach nothing."""
    micro_batch_trajectories: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Most trajectories in one forward pass. It does not change the update. If unset, 64 on a CPU,
    and on a GPU as many as its memory holds."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Most tokens in one forward pass, padding included; a longer trajectory has a pass for itself.
    It does not change the update. If unset, as many as the GPU's free memory holds; on a CPU there
    is no limit then. Lower it if the learner runs out of memory."""
    row_layout: RowLayout = RowLayout.AUTO
    """How trajectories are laid out in the rows of a forward pass: `padded` (one to a row),
    `packed` (all of a micro-batch in one row without padding, for models whose attention can be
    `varlen`; the learner tests this at the start) or `auto` (`packed` on a GPU whose kernel takes
    the model's rows and where that test passes, else `padded`; the learner's log says which). It
    does not change the update."""
    over_provision_ratio: Annotated[float, Field(ge=1.0, le=8.0)] = 1.0
    """Trajectories in flight for the next batch, as a multiple of the batch. When a batch is
    complete, the surplus is interrupted and released; its tokens are kept and resumed later. Raise
    it if a few long responses delay each batch and `maxPolicyLagSteps` may not be raised."""
    prompt_pool: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Number of training prompts: the first ones of the environment are used again and again. If
    unset, every prompt is new."""
    prompt_selection: PromptSelection = PromptSelection.SEQUENTIAL
    """Order of prompts: `sequential`, or the most undecided prompt by a learned network
    (`teacher`), which needs `promptPool` and rewards between 0 and 1."""

    @model_validator(mode="after")
    def _selection_has_a_pool(self) -> Self:
        if self.prompt_selection is not PromptSelection.SEQUENTIAL and self.prompt_pool is None:
            message = "needs `promptPool`; give its number of prompts or use 'sequential'"
            value = str(self.prompt_selection)
            refuse([conflict("promptSelection", value=value, message=message)])
        return self

    @property
    def trajectories(self) -> int:
        return self.prompts_per_step * self.trajectories_per_prompt


class Sampling(Section):
    """How training responses are sampled."""

    temperature: Annotated[float, Field(ge=0.05, le=5.0)] = 1.0
    """Softmax temperature of training responses; at most 2 for engine `vllm`. The learner scores
    tokens at the same temperature. Raise it if responses to a prompt are all alike."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 1024
    """Longest response, in tokens. A longer one is truncated, and the environment scores what there
    is. The model's context must hold it together with the prompt. Raise it if many responses are
    truncated."""
    stop_strings: Annotated[
        tuple[StopString, ...],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Strings that end a response, or a turn of it, at the token that completes one; such as
    `</answer>`. The string stays in the text that the environment gets, and all tokens are trained
    on. If empty, only the model's end token ends a response."""

    @model_validator(mode="after")
    def _stop_strings_differ(self) -> Self:
        strings = self.stop_strings
        refuse(
            conflict("stopStrings", index, value=string, message="is there twice; remove one")
            for index, string in enumerate(strings)
            if string in strings[:index]
        )
        return self

    def room_problem(self, context_tokens: int | None) -> str | None:
        """Return why a model with this context cannot respond to any prompt, or None if it can."""
        if context_tokens is None or self.max_new_tokens < context_tokens:
            return None
        return (
            f"leaves no room for a prompt: the model reads {context_tokens} tokens, prompt and"
            f" response together; give less than {context_tokens}"
        )


class Evaluation(Section):
    """Evaluation on held-out prompts, whose responses the rollout workers sample."""

    every_steps: Steps = 25
    """Optimizer steps between evaluations. One more is always made at the start and at the end.
    Raise it if evaluations take much of the workers' time."""
    prompts: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Number of held-out prompts; every evaluation uses the same ones, and counts each once. Raise
    it to tell smaller differences apart: the error of an accuracy is up to 0.5 / sqrt(prompts)."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Responses sampled for each held-out prompt."""
    temperature: Annotated[float, Field(ge=0.05, le=5.0)] = 1.0
    """Softmax temperature of the evaluation's responses; at most 2 for engine `vllm`."""
