"""The mathematics of variance-controlled off-policy training, on plain numbers.

Everything that VCPO decides about one optimizer step is a function of a few numbers per trajectory:
its log importance weight, its length, its reward and the norm of its gradient. These modules hold
those functions. They know no tensors, clocks, files, sockets or logs.

| module          | question it answers                                                     |
|-----------------|-------------------------------------------------------------------------|
| `weights`       | How far is the learner from the sampler, and what is left of the batch? |
| `calibration`   | What would be left of it on policy, given these lengths?                |
| `learning_rate` | How large a step does the batch support?                                |
| `baseline`      | Which baseline gives the quietest gradient?                             |
| `advantage`     | With what sign and size does each trajectory count?                     |

One step reads:

>>> log_weights = [0.0, -0.5, 0.7, 1.4]
>>> scale = learning_rate_scale(ess_ratio(log_weights), on_policy_ess_ratio=0.9)
>>> round(scale, 3)
0.865
>>> advantages([1.0, 0.0, 1.0, 0.0], Baseline.OPOB, squared_norms=[1.0, 0.25, 16.0, 16.0])[0]
0.4887218045112782

Source of the method: VCPO, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", arXiv
2602.17616. Each module names the equations it follows and where it departs from the release.
"""

from vcpo.algo.advantage import BaselineScope, advantages, batch_advantages
from vcpo.algo.baseline import Baseline, mean_baseline, optimal_baseline, published_baseline
from vcpo.algo.calibration import FreshTrajectory, MismatchCalibration
from vcpo.algo.learning_rate import LearningRateRule, learning_rate_scale
from vcpo.algo.weights import (
    NonFiniteWeightError,
    effective_sample_size,
    ess_ratio,
    log_importance_weight,
    log_sum_exp,
    truncated_weight,
)

__all__ = [
    "Baseline",
    "BaselineScope",
    "FreshTrajectory",
    "LearningRateRule",
    "MismatchCalibration",
    "NonFiniteWeightError",
    "advantages",
    "batch_advantages",
    "effective_sample_size",
    "ess_ratio",
    "learning_rate_scale",
    "log_importance_weight",
    "log_sum_exp",
    "mean_baseline",
    "optimal_baseline",
    "published_baseline",
    "truncated_weight",
]
