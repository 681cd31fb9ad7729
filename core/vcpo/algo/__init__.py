"""The mathematics of variance-controlled off-policy training, on plain numbers.

VCPO decides about an optimizer step from four numbers per trajectory: its log importance weight,
its length, its reward and the norm of its gradient. The functions of this package compute these
decisions. They use no tensors, clocks, files, sockets or logs.

Arguments may be Python numbers, numpy arrays or torch tensors, of any dtype and on any device.

| module                   | question that it answers                                          |
|--------------------------|-------------------------------------------------------------------|
| `arrays`                 | What numbers does an array hold?                                  |
| `ess.importance_weights` | How far is the learner from the behavior policy?                  |
| `ess.moments`            | Which sums give the ESS of a set of weights?                      |
| `ess.unit`               | Over how many tokens is one importance weight taken?              |
| `ess.calibration`        | Which ESS ratio would these lengths have on policy?               |
| `ess.finite_batch`       | How does that ratio scatter in a batch of this size?              |
| `ess.verdict`            | Is the step taken, and at which share of the learning rate?       |
| `ess.learning_rate`      | How does the learning rate follow the ESS ratio?                  |
| `ess.trust_region`       | Which rate keeps data usable until it is used?                    |
| `coverage`               | How much of the policy does stale data show?                      |
| `baseline`               | Which baseline minimizes the variance of the gradient?            |
| `agreement`              | Do two computations of one number differ by rounding alone?       |
| `shrinkage`              | How far is the baseline of a prompt its own?                      |
| `advantage`              | With which sign and size does each trajectory count?              |
| `vtrace`                 | What is each token worth, given a critic and off-policy samples?  |
| `methods`                | Which settings make up a published method?                        |
| `rollout_noise`          | How much noise do the weights of a rollout policy carry?          |
| `health.collapse`        | Did a run lose what it had learned?                               |
| `health.diagnostics`     | What does a batch look like?                                      |
| `health.lag_breakdown`   | At which lags does a batch lose its ESS?                          |
| `health.fresh_tokens`    | How far are worker and learner apart at the same version?         |
| `health.mismatch_limits` | How much of that does rounding explain?                           |
| `health.mismatch_review` | Do workers and learner compute the same policy, and if not, why?  |
| `health.early_warning`   | How is the run doing?                                             |
| `health.rate_backoff`    | At which share of its learning rate does a critical run go on?    |
| `health.guards`          | What does a run do by itself about its warning or its collapse?   |

An example of one step:

>>> log_weights = [0.0, -0.5, 0.7, 1.4]
>>> scale = learning_rate_scale(ess_ratio(log_weights), on_policy_ess_ratio=0.9)
>>> round(scale, 3)
0.865
>>> advantages([1.0, 0.0, 1.0, 0.0], Baseline.OPOB, squared_norms=[1.0, 0.25, 16.0, 16.0])[0]
0.4887218045112782

Source of the method: VCPO, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", arXiv
2602.17616. Each module names its equations and how it differs from the released code.
"""

from vcpo.algo.advantage import (
    BASELINES_OF_SCOPE,
    SHARED_NUMBERS,
    AdvantageFunction,
    BaselineScope,
    advantages,
    batch_advantages,
    numbers_wanted,
)
from vcpo.algo.agreement import is_rounding
from vcpo.algo.baseline import (
    Baseline,
    GradientNormEstimator,
    left_out_baselines,
    mean_baseline,
    optimal_baseline,
    pessimistic_baseline,
    published_baseline,
)
from vcpo.algo.coverage import on_policy_mean_weight, policy_coverage
from vcpo.algo.ess.calibration import (
    FRESH_BLOCK_TOKENS,
    MISMATCH_CEILING,
    STALE_STEPS,
    MismatchCalibration,
)
from vcpo.algo.ess.finite_batch import FiniteBatchLaw, finite_batch_law, nats_at_size
from vcpo.algo.ess.importance_weights import (
    NonFiniteWeightError,
    effective_sample_size,
    ess_ratio,
    log_importance_weight,
    log_sum_exp,
    truncated_weight,
)
from vcpo.algo.ess.learning_rate import LearningRateRule, learning_rate_scale
from vcpo.algo.ess.moments import WeightMoments
from vcpo.algo.ess.trust_region import (
    TARGET_BATCH,
    TARGET_ESS_RATIO,
    DriftMeans,
    TrustRegion,
    horizon_of_lag,
)
from vcpo.algo.ess.unit import (
    EssKind,
    EssReading,
    EssUnit,
    block_log_weights,
    ess_reading,
    ess_unit,
    near_equal_blocks,
)
from vcpo.algo.ess.verdict import RefusalReason, StepLimits, StepVerdict, judge_step
from vcpo.algo.health.collapse import (
    FAR_DISTANCES,
    REWARD_WINDOW_STEPS,
    Collapse,
    RewardWatch,
    find_collapse,
    near_rewards,
    num_low_at_end,
    share_error,
)
from vcpo.algo.health.diagnostics import BatchDiagnostics, NormStatistics, TokenSums, diagnose
from vcpo.algo.health.early_warning import EarlyWarning, StepHealth, WarningLevel, warning_level
from vcpo.algo.health.fresh_tokens import (
    MIN_FRESH_BLOCKS,
    Estimate,
    FreshTokens,
    lower_median,
)
from vcpo.algo.health.guards import GuardPolicy, RollbackNeed, Rollbacks
from vcpo.algo.health.lag_breakdown import LagBucket, LaggedTrajectory, lag_breakdown
from vcpo.algo.health.mismatch_limits import (
    MISMATCH_LIMITS_NATS,
    MismatchClass,
    MismatchLimits,
)
from vcpo.algo.health.mismatch_review import (
    WINDOW_BLOCKS,
    MismatchCause,
    MismatchError,
    MismatchFault,
    MismatchReview,
    MismatchWindow,
    WorkerGap,
)
from vcpo.algo.health.rate_backoff import RateBackoff
from vcpo.algo.methods import (
    LOSS_CONFIGS,
    SURROGATE_LOSS,
    Aggregation,
    Clipping,
    GroupFilter,
    KLPenalty,
    LossConfig,
    Method,
    Weight,
)
from vcpo.algo.rollout_noise import NoiseSchedule
from vcpo.algo.shrinkage import shrunk_baselines
from vcpo.algo.vtrace import VTrace, vtrace

__all__ = [
    "BASELINES_OF_SCOPE",
    "FAR_DISTANCES",
    "FRESH_BLOCK_TOKENS",
    "LOSS_CONFIGS",
    "MIN_FRESH_BLOCKS",
    "MISMATCH_CEILING",
    "MISMATCH_LIMITS_NATS",
    "REWARD_WINDOW_STEPS",
    "SHARED_NUMBERS",
    "STALE_STEPS",
    "SURROGATE_LOSS",
    "TARGET_BATCH",
    "TARGET_ESS_RATIO",
    "WINDOW_BLOCKS",
    "AdvantageFunction",
    "Aggregation",
    "Baseline",
    "BaselineScope",
    "BatchDiagnostics",
    "Clipping",
    "Collapse",
    "DriftMeans",
    "EarlyWarning",
    "EssKind",
    "EssReading",
    "EssUnit",
    "Estimate",
    "FiniteBatchLaw",
    "FreshTokens",
    "GradientNormEstimator",
    "GroupFilter",
    "GuardPolicy",
    "KLPenalty",
    "LagBucket",
    "LaggedTrajectory",
    "LearningRateRule",
    "LossConfig",
    "Method",
    "MismatchCalibration",
    "MismatchCause",
    "MismatchClass",
    "MismatchError",
    "MismatchFault",
    "MismatchLimits",
    "MismatchReview",
    "MismatchWindow",
    "NoiseSchedule",
    "NonFiniteWeightError",
    "NormStatistics",
    "RateBackoff",
    "RefusalReason",
    "RewardWatch",
    "RollbackNeed",
    "Rollbacks",
    "StepHealth",
    "StepLimits",
    "StepVerdict",
    "TokenSums",
    "TrustRegion",
    "VTrace",
    "WarningLevel",
    "Weight",
    "WeightMoments",
    "WorkerGap",
    "advantages",
    "batch_advantages",
    "block_log_weights",
    "diagnose",
    "effective_sample_size",
    "ess_ratio",
    "ess_reading",
    "ess_unit",
    "find_collapse",
    "finite_batch_law",
    "horizon_of_lag",
    "is_rounding",
    "judge_step",
    "lag_breakdown",
    "learning_rate_scale",
    "left_out_baselines",
    "log_importance_weight",
    "log_sum_exp",
    "lower_median",
    "mean_baseline",
    "nats_at_size",
    "near_equal_blocks",
    "near_rewards",
    "num_low_at_end",
    "numbers_wanted",
    "on_policy_mean_weight",
    "optimal_baseline",
    "pessimistic_baseline",
    "policy_coverage",
    "published_baseline",
    "share_error",
    "shrunk_baselines",
    "truncated_weight",
    "vtrace",
    "warning_level",
]
