"""What is allowed in a run's algorithm and yet seldom wanted, said before it costs a night."""

from __future__ import annotations

from collections.abc import Iterator

from vcpo.algo import (
    Baseline,
    Gate,
    GroupFilter,
    LearningRateRule,
    Recipe,
    Residual,
    Weight,
)
from vcpo.spec.algorithm import Algorithm, Batch


def algorithm_warnings(algorithm: Algorithm) -> tuple[str, ...]:
    """Sentences that name the field, what it does here, and what else to write.

    The ESS rule reads sequence weights. Where a method's gradient does not hold them, the rule
    damps for a variance that the gradient has not got, or a second time beside the method's own
    brake.
    """
    recipe = algorithm.recipe
    return (*_about_rule(recipe), *_about_baseline(recipe), *_about_data(algorithm, recipe))


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


def _about_rule(recipe: Recipe) -> Iterator[str]:
    if recipe.learning_rate_rule is LearningRateRule.NONE:
        return
    rule = f"learningRateRule '{recipe.learning_rate_rule}'"
    if recipe.residual is not Residual.NONE:
        yield f"{rule} damps a second time beside `regularization`; 'none' leaves it to that"
    elif recipe.weight is Weight.GEOMETRIC:
        yield (
            f"{rule} reads the spread of sequence weights, which the geometric ratio does not have:"
            " steps shrink for staleness that this gradient hardly shows; 'none' is its own"
        )
    elif recipe.weight is Weight.NONE:
        yield (
            f"{rule} reads importance weights that this method's gradient does not hold: it is a"
            " brake for staleness only; 'none' is the method's own"
        )


def _about_baseline(recipe: Recipe) -> Iterator[str]:
    if recipe.baseline is Baseline.OPOB and recipe.gate is not Gate.OPEN:
        yield (
            f"baseline 'opob' weighs trajectories by their gradient before the gate"
            f" '{recipe.gate}', and takes a second pass; it is of least variance for methods"
            " without a gate, such as 'vcpo' or 'cispo'"
        )


def _about_data(algorithm: Algorithm, recipe: Recipe) -> Iterator[str]:
    corrects = recipe.weight is not Weight.NONE or recipe.gate is not Gate.OPEN
    is_regularized = recipe.residual is not Residual.NONE
    if algorithm.max_policy_lag_steps > 0 and not corrects and not is_regularized:
        yield (
            f"method '{algorithm.method}' takes stale data for fresh: nothing in it corrects for"
            f" `maxPolicyLagSteps` {algorithm.max_policy_lag_steps}; 'sequenceTis' does"
        )
    if recipe.group_filter is GroupFilter.INFORMATIVE:
        yield (
            "groupFilter 'informative' waits for groups whose rewards differ: on a task that is"
            " all right or all wrong no step is taken; 'none' goes on"
        )
