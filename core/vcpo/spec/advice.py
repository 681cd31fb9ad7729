"""What is allowed in a run's algorithm and yet seldom wanted, said before it costs a night."""

from __future__ import annotations

from collections.abc import Iterator

from vcpo.algo import (
    Baseline,
    Clipping,
    GroupFilter,
    KLPenalty,
    LearningRateRule,
    LossConfig,
    Weight,
)
from vcpo.spec.algorithm import Algorithm, Batch


def algorithm_warnings(algorithm: Algorithm) -> tuple[str, ...]:
    """Sentences that name the field, what it does here, and what else to write.

    The ESS rule reads sequence weights. Where a method's gradient does not hold them, the rule
    damps for a variance that the gradient has not got, or a second time beside the method's own
    brake.
    """
    config = algorithm.loss_config
    return (*_about_rule(config), *_about_baseline(config), *_about_data(algorithm, config))


def batch_warnings(batch: Batch, algorithm: Algorithm) -> Iterator[str]:
    """Sentences about what is sampled for a batch, as those of `algorithm_warnings`."""
    default = Batch.model_fields["micro_batch_trajectories"].default
    if batch.trajectories < batch.micro_batch_trajectories != default:
        yield (
            f"microBatchTrajectories {batch.micro_batch_trajectories} is more than the"
            f" {batch.trajectories} trajectories of a step: all of them are one forward pass,"
            " and a smaller number saves memory only below that"
        )
    if batch.over_provision_ratio > 1.0 and algorithm.max_policy_lag_steps == 0:
        yield (
            f"overProvisionRatio {batch.over_provision_ratio:g} keeps nothing of what it cuts: a"
            " step later its tokens are older than `maxPolicyLagSteps` 0 allows; 1 keeps them"
        )


def _about_rule(config: LossConfig) -> Iterator[str]:
    if config.learning_rate_rule is LearningRateRule.NONE:
        return
    rule = f"learningRateRule '{config.learning_rate_rule}'"
    if config.kl_penalty is not KLPenalty.NONE:
        yield f"{rule} damps a second time beside `regularization`; 'none' leaves it to that"
    elif config.weight is Weight.GEOMETRIC:
        yield (
            f"{rule} reads the spread of sequence weights, which the geometric ratio does not have:"
            " steps shrink for staleness that this gradient hardly shows; 'none' is its own"
        )
    elif config.weight is Weight.NONE:
        yield (
            f"{rule} reads importance weights that this method's gradient does not hold: it is a"
            " brake for staleness only; 'none' is the method's own"
        )


def _about_baseline(config: LossConfig) -> Iterator[str]:
    if config.baseline is Baseline.OPOB and config.clipping is not Clipping.OPEN:
        yield (
            f"baseline 'opob' weighs trajectories by their gradient before the gate"
            f" '{config.clipping}', and takes a second pass; it is of least variance for methods"
            " without a gate, such as 'vcpo' or 'cispo'"
        )


def _about_data(algorithm: Algorithm, config: LossConfig) -> Iterator[str]:
    corrects = config.weight is not Weight.NONE or config.clipping is not Clipping.OPEN
    is_regularized = config.kl_penalty is not KLPenalty.NONE
    if algorithm.max_policy_lag_steps > 0 and not corrects and not is_regularized:
        yield (
            f"method '{algorithm.method}' takes stale data for fresh: nothing in it corrects for"
            f" `maxPolicyLagSteps` {algorithm.max_policy_lag_steps}; 'sequenceTis' does"
        )
    if config.group_filter is GroupFilter.DYNAMIC_SAMPLING:
        yield (
            "groupFilter 'informative' waits for groups whose rewards differ: on a task that is"
            " all right or all wrong no step is taken; 'none' goes on"
        )
