"""Warnings about settings that are valid and seldom useful."""

from collections.abc import Iterator, Sequence

from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.verdict import LearningRateRule
from vcpo.algo.methods import Clipping, GroupFilter, KLPenalty, LossConfig, Weight
from vcpo.api.algorithm import Algorithm, Batch
from vcpo.api.workloads import EngineName, Model, Precision, RolloutGroup


def algorithm_warnings(algorithm: Algorithm) -> tuple[str, ...]:
    """Return sentences that name the field, what it does here, and what to write instead.

    The learning-rate rule reads sequence weights. If a method's gradient does not contain them, the
    rule lowers the rate for a variance that the gradient does not have, or a second time beside
    the method's own KL penalty.
    """
    config = algorithm.loss_config
    if algorithm.loss is not None:
        return tuple(_about_filter(config))  # nothing is known of the gradient's weights
    return (
        *_about_rule(config),
        *_about_baseline(config),
        *_about_data(algorithm, config),
        *_about_filter(config),
    )


def batch_warnings(batch: Batch, algorithm: Algorithm) -> Iterator[str]:
    """Yield sentences about a batch, as `algorithm_warnings` does about an algorithm."""
    given = batch.micro_batch_trajectories
    if given is not None and batch.trajectories < given:
        yield (
            f"microBatchTrajectories {given} is more than the"
            f" {batch.trajectories} trajectories of a step, which are one forward pass in any"
            f" case; to save memory, give less than {batch.trajectories}"
        )
    if batch.over_provision_ratio > 1.0 and algorithm.max_policy_lag_steps == 0:
        yield (
            f"overProvisionRatio {batch.over_provision_ratio:g} wastes what it interrupts: one"
            " step later the partial responses are older than `maxPolicyLagSteps` 0 allows; use 1"
        )


def rollout_warnings(model: Model, groups: Sequence[RolloutGroup]) -> Iterator[str]:
    """Yield sentences about rollout groups, as `algorithm_warnings` does about an algorithm."""
    for group in groups if model.lora is not None else ():
        if group.engine_name == EngineName.VLLM and group.precision is Precision.FLOAT32:
            yield (
                f"{group.name}: precision 'float32' makes a worker with a GPU merge the adapters of"
                " every version into a copy of the model; with 'bfloat16' vLLM serves them beside"
                " the one that it has"
            )


def _about_rule(config: LossConfig) -> Iterator[str]:
    if config.learning_rate_rule is LearningRateRule.NONE:
        return
    rule = f"learningRateRule '{config.learning_rate_rule}'"
    if config.kl_penalty is not KLPenalty.NONE:
        yield (
            f"{rule} lowers the rate for staleness that the KL penalty (`klCoefficient`) limits"
            " already; use 'none', the method's own"
        )
    elif config.weight is Weight.GEOMETRIC:
        yield (
            f"{rule} reads sequence weights, and this method's gradient has geometric ratios, which"
            " spread much less: the rate falls too far; use 'none', the method's own"
        )
    elif config.weight is Weight.NONE:
        yield (
            f"{rule} reads importance weights, and this method's gradient has none: the rate falls"
            " with staleness only; use 'none', the method's own"
        )


def _about_baseline(config: LossConfig) -> Iterator[str]:
    optimal = (Baseline.OPOB, Baseline.PESSIMISTIC)
    if config.baseline in optimal and config.clipping is not Clipping.OPEN:
        yield (
            f"baseline '{config.baseline}' weighs trajectories by their gradient before the"
            f" clipping '{config.clipping}', and takes a second pass; its variance is least for"
            " methods without clipping, such as 'vcpo' or 'cispo'"
        )


def _about_data(algorithm: Algorithm, config: LossConfig) -> Iterator[str]:
    corrects = config.weight is not Weight.NONE or config.clipping is not Clipping.OPEN
    is_regularized = config.kl_penalty is not KLPenalty.NONE
    if algorithm.max_policy_lag_steps > 0 and not corrects and not is_regularized:
        yield (
            f"method '{algorithm.method}' does not correct for stale data, and `maxPolicyLagSteps`"
            f" is {algorithm.max_policy_lag_steps}; use 0, or a method that corrects, such as"
            " 'sequenceTis'"
        )


def _about_filter(config: LossConfig) -> Iterator[str]:
    if config.group_filter is GroupFilter.DYNAMIC_SAMPLING:
        yield (
            "dynamic sampling waits for groups whose rewards differ: if the"
            " model solves all prompts or none, no step is taken"
        )
