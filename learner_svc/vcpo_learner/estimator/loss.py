r"""The loss of every method, top to bottom: from rewards to the coefficient of every token.

At the parameters that a step starts from, the gradient of every loss is

    grad L = sum_{i,t} k_it grad log pi(y_it),    k_it = -A_it a_it g_it.

`LossConfig` chooses each factor. For example, with u_t = pi/mu of a token and W of a trajectory,

    VCPO   A = R - b*                a = min(W, 8) / (B T)    g = 1
    GRPO   A = (R - mean R) / std R  a = u / (B T)            g = PPO's clip to [.8, 1.2]
    DAPO   A as GRPO, R - overlong   a = u / sum T            g = PPO's clip to [.8, 1.28]
"""

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from vcpo.algo.advantage import BaselineScope, advantages, batch_advantages
from vcpo.algo.baseline import Baseline, optimal_baseline, pessimistic_baseline
from vcpo.algo.coverage import policy_coverage
from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.methods import KLPenalty, LossConfig
from vcpo.api.algorithm import NORM_BASELINES
from vcpo_learner.estimator.clipping import clip_factors, token_weights
from vcpo_learner.estimator.own_functions import advantage_function, loss_function
from vcpo_learner.estimator.record import BatchRecord, TokenCoefficients
from vcpo_learner.per_sample_gradients.weighted_sum import relative_offsets


def shaped_rewards(record: BatchRecord, config: LossConfig) -> Tensor:
    """Return R minus DAPO's overlong penalty, [B] float64."""
    if config.overlong_share == 0.0:
        return record.rewards
    return record.rewards - overlong_penalties(record, config.overlong_share)


def overlong_penalties(record: BatchRecord, share: float) -> Tensor:
    """Return the penalty of each response's length, [B] in [0, 1].

    It rises linearly over the last `share` of the longest response; share: above 0.
    """
    longest = record.size.longest_response
    excess = record.lengths.double() - longest * (1.0 - share)
    return (excess / (longest * share)).clamp(0.0, 1.0)


def regularized_rewards(rewards: Tensor, record: BatchRecord, config: LossConfig) -> Tensor:
    """Return the rewards minus beta log(pi/reference) for TBA and AGRO, [B].

    Departure from TBA, whose loss is in units of beta: R - beta log(pi/reference) is its
    R/beta - log(pi/reference) times beta, one constant on the whole gradient, which AdamW divides
    out.
    """
    if config.kl_penalty is not KLPenalty.REFERENCE:
        return rewards
    if record.reference_logprobs is None:
        raise ValueError("reference_logprobs is None: this KL penalty needs one per token")
    log_ratios = record.learner_logprobs.double() - record.reference_logprobs
    return rewards - config.kl_coefficient * record.sums(log_ratios)


def trajectory_advantages(
    rewards: Sequence[Sequence[float]],
    squared_norms: Sequence[Sequence[float]],
    log_weights: Sequence[Sequence[float]],
    config: LossConfig,
    on_policy_weight: float = 1.0,
    num_tokens: Sequence[Sequence[int]] | None = None,
) -> list[float]:
    """Return reward minus baseline of each trajectory, [B], the groups one after another.

    rewards, squared_norms, log_weights, num_tokens: [num_groups][n_g].
    on_policy_weight: mean truncated weight that the batch would have on policy, in (0, 1].
    Raises: NonFiniteWeightError if a norm is not a number; OwnFunctionError if a user's baseline
        fails.
    Source: VCPO, arXiv 2602.17616, Eq. 7.
    """
    is_of_groups = config.baseline_scope is BaselineScope.GROUP
    sharing = log_weights if is_of_groups else [list(chain.from_iterable(log_weights))]
    groups = batch_advantages(
        rewards,
        advantage_function(config.baseline),
        config.baseline_scope,
        squared_norms=squared_norms,
        log_weights=log_weights,
        coverages=[shared_coverage(each, config, on_policy_weight) for each in sharing],
        num_tokens=num_tokens,
    )
    return list(chain.from_iterable(groups))


def shared_coverage(
    log_weights: Sequence[float], config: LossConfig, on_policy_weight: float
) -> float:
    """Return the coverage by trajectories that share a baseline; 1 where the baseline has no use.

    log_weights: nats, untruncated. on_policy_weight: as for `trajectory_advantages`.
    Raises: NonFiniteWeightError for a weight that is not a number.
    """
    if config.baseline is not Baseline.PESSIMISTIC and isinstance(config.baseline, Baseline):
        return 1.0
    return policy_coverage(log_weights, config.largest_weight, on_policy_weight)


def token_coefficients(
    record: BatchRecord, advantages: Sequence[float], config: LossConfig
) -> TokenCoefficients:
    """Return the coefficients of a whole batch, by the loss that the configuration names.

    advantages: [B] after the baseline.
    Raises: NonFiniteWeightError, with the trajectory's index, if a coefficient is not a number;
        OwnFunctionError if a user's loss fails or returns something else.
    """
    compute = loss_function(config.loss)
    found = compute(record, record.rewards.new_tensor(advantages), config)
    for index, total in enumerate(record.sums(found.values).tolist()):
        if not math.isfinite(total):
            raise NonFiniteWeightError("coefficients", index, total)
    return found


def surrogate_coefficients(
    record: BatchRecord, advantages: Tensor, config: LossConfig
) -> TokenCoefficients:
    """Return the coefficients of the shipped methods.

    advantages: [B] after the baseline. A token whose weight or clip factor is 0 has coefficient 0,
        whatever its advantage.
    """
    per_token = token_advantages(record, advantages, config)
    factors = clip_factors(record, per_token, config)
    weights = token_weights(record, config) * factors
    values = (-per_token * weights).masked_fill(weights == 0.0, 0.0)
    masked_share = float((factors == 0.0).double().mean())
    return TokenCoefficients(values=values, masked_share=masked_share)


def token_advantages(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """Return the advantage A_it of each token, [N] float64.

    A trajectory's advantage [B], minus tau log W for Kimi, whitened over tokens for REINFORCE++;
    or V-trace's own.
    """
    if config.has_critic:
        if record.advantages is None:
            raise ValueError("advantages is None: this method needs one per token")
        return record.advantages
    by_trajectory = advantages
    if config.kl_penalty is KLPenalty.BEHAVIOR:
        by_trajectory = by_trajectory - config.kl_coefficient * record.sums(record.log_ratios)
    per_token = record.spread(by_trajectory)
    return whiten(per_token) if config.is_whitened else per_token


def whiten(values: Tensor) -> Tensor:
    """Return values [N] with mean 0 and deviation 1; 0 if they are all equal."""
    deviation = values.std(correction=0)
    if float(deviation) == 0.0:
        return torch.zeros_like(values)
    return (values - values.mean()) / deviation


def group_offsets(
    rewards: Sequence[Sequence[float]],
    squared_weights: Sequence[Sequence[float]],
    config: LossConfig,
) -> list[list[float]]:
    """Return what is known of each c_i = -A_i before any norm, [num_groups][n_g].

    With an optimal baseline, this is -R_i minus one constant per group, which returns in the
    group's slope; else it is -A_i.
    rewards: [num_groups][n_g]. squared_weights: sum_t a_it^2 of each trajectory.
    """
    if config.baseline not in NORM_BASELINES:
        baseline = Baseline(config.baseline)
        return [[-each for each in advantages(own, baseline)] for own in rewards]
    rows = zip(rewards, squared_weights, strict=True)
    return [relative_offsets([-reward for reward in own], squares) for own, squares in rows]


def group_slopes(
    offsets: Sequence[Sequence[float]],
    squared_norms: Sequence[Sequence[float]],
    log_weights: Sequence[Sequence[float]],
    config: LossConfig,
    on_policy_weight: float = 1.0,
) -> list[float]:
    """Return what completes the c_i of each group, c_i = offset_i + slope, [num_groups].

    offsets: as `group_offsets` returns them; the slope is the baseline of the negated offsets.
    on_policy_weight: as for `trajectory_advantages`.
    Raises: NonFiniteWeightError if a norm is not a number.
    """
    rewards = [[-offset for offset in own] for own in offsets]
    rows = list(zip(rewards, squared_norms, log_weights, strict=True))
    match config.baseline:
        case Baseline.OPOB:
            return [optimal_baseline(own, norms) for own, norms, _ in rows]
        case Baseline.PESSIMISTIC:
            return [
                pessimistic_baseline(own, norms, shared_coverage(weights, config, on_policy_weight))
                for own, norms, weights in rows
            ]
    return [0.0] * len(rows)
