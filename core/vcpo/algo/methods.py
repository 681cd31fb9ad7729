r"""The methods of the field by name, each as a configuration of one loss.

One optimizer step is taken on each batch. At the parameters that the step starts from, the gradient
of every surrogate loss is linear in the gradients of the sampled tokens' log-probabilities,

    grad L = sum_{i,t} k_it grad log pi(y_it),    k_it = - A_it a_it g_it,

so a method is a way to compute k_it from a batch's numbers. Its stages, in the order in which
`vcpo_learner.estimator.loss` computes them:

| stage       | symbol | what it is                                                             |
|-------------|--------|------------------------------------------------------------------------|
| filter      |        | which groups are trained on at all                                     |
| KL penalty  |        | what a reward or an advantage loses for distance from another policy   |
| advantage   | A_it   | reward minus baseline, or V-trace's advantage                          |
| weight      | a_it   | importance weight of one trajectory's tokens                           |
| aggregation | a_it   | how tokens and trajectories are averaged                               |
| clipping    | g_it   | factor of a clip or mask; it may depend on A and on the whole batch    |
| rule        |        | how the ESS of the batch scales the learning rate                      |

The clipped and masked methods use u = pi/mu of the learner's policy to the behavior policy: with
one step on a batch, PPO's "old" policy is the learner itself.

`docs/methods.md` has a row with formula and source for each method, `LOSS_CONFIGS` its numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from vcpo.algo.advantage import BASELINES, BaselineScope, numbers_wanted
from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo.algo.ess.verdict import LearningRateRule


class Method(StrEnum):
    """A method, by the name that `algorithm.method` takes."""

    VCPO = "vcpo"
    VCPO2 = "vcpo2"
    REINFORCE = "reinforce"
    SEQUENCE_TIS = "sequenceTis"
    TOKEN_TIS = "tokenTis"
    RLOO = "rloo"
    GRPO = "grpo"
    DR_GRPO = "drGrpo"
    REINFORCE_PLUS_PLUS = "reinforcePlusPlus"
    PPO = "ppo"
    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    ICE_POP = "icePop"
    SEQUENCE_MASK = "sequenceMask"
    GEOMETRIC_MASK = "geometricMask"
    OPSM = "opsm"
    M2PO = "m2po"
    BAPO = "bapo"
    STAPO = "stapo"
    TBA = "tba"
    AGRO = "agro"
    OPMD = "opmd"
    TOPR = "topr"
    KIMI = "kimi"
    DECOUPLED_PPO = "decoupledPpo"
    A3PO = "a3po"
    VTRACE = "vtrace"


class Weight(StrEnum):
    """Which ratio of target policy to behavior policy multiplies a token's gradient."""

    NONE = "none"
    TOKEN = "token"
    """u_t = pi/mu of the token."""
    SEQUENCE = "sequence"
    """W, the product of u over the trajectory."""
    GEOMETRIC = "geometric"
    """s = W^(1/T)."""


class Clipping(StrEnum):
    """Which clip or mask is applied to a token's gradient."""

    OPEN = "open"
    CLIP = "clip"
    """PPO's: no gradient where the ratio left the band in the direction of the advantage."""
    PROXIMAL_CLIP = "proximalClip"
    """The same on the ratio of pi to a policy between behavior and target policy (A-3PO)."""
    OFF_POLICY_MASK = "offPolicyMask"
    """`CLIP`, and no gradient from sequences with a negative advantage that became improbable
    (OPSM)."""
    SECOND_MOMENT = "secondMoment"
    """Drops the largest log ratios among tokens whose ratio the advantage moves further from 1
    (M2PO)."""
    BALANCED = "balanced"
    """PPO's clip with a band computed from the share of positive gradient (BAPO)."""
    SPURIOUS = "spurious"
    """`CLIP`, and no gradient from rewarded tokens of low probability and low entropy (STAPO)."""
    TAPERED = "tapered"
    """Factor min(1, W) for trajectories with a negative advantage, 1 for the others (TOPR)."""


_CLIPS_OF_ONE_TRAJECTORY: Final = (
    Clipping.OPEN,
    Clipping.CLIP,
    Clipping.OFF_POLICY_MASK,
    Clipping.TAPERED,
)
"""Clips that compare a trajectory with no other, and need no further input."""


class KLPenalty(StrEnum):
    """What a reward or an advantage loses for distance from another policy."""

    NONE = "none"
    REFERENCE = "reference"
    """tau log(pi/reference), off the reward, before the baseline (TBA, AGRO)."""
    BEHAVIOR = "behavior"
    """tau log(pi/mu), off the advantage, after the baseline (Kimi)."""


class GroupFilter(StrEnum):
    """Which groups a step trains on."""

    NONE = "none"
    """All groups, in the order of their completion."""
    DYNAMIC_SAMPLING = "informative"
    """Groups whose rewards differ; the others are dropped and replaced (DAPO)."""


class Aggregation(StrEnum):
    """How tokens and trajectories are averaged."""

    SEQUENCE_MEAN = "sequenceMean"
    """1/(B T_i): the mean over trajectories of their means over tokens."""
    TOKEN_MEAN = "tokenMean"
    """1/sum_i T_i: the mean over all tokens of the batch."""
    SEQUENCE_SUM = "sequenceSum"
    """1/B: the mean over trajectories of their sums over tokens."""
    CONSTANT = "constant"
    """1/(B L), with L the longest response allowed."""


SETTINGS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "weight_cap": (1.0, 1e6),
        "weight_floor": (0.0, 1.0),
        "clip_low": (0.0, 1.0),
        "clip_high": (0.0, 1e6),
        "dual_clip": (1.0, 1e6),
        "threshold": (0.0, 100.0),
        "kl_coefficient": (0.0, 1e3),
        "overlong_share": (0.0, 1.0),
    }
)
"""Numbers of a `LossConfig` that a run may replace, with their smallest and largest value."""

_FIXED_BANDS: Final = (
    Clipping.CLIP,
    Clipping.PROXIMAL_CLIP,
    Clipping.OFF_POLICY_MASK,
    Clipping.SPURIOUS,
)
"""Clippings whose band is a setting."""

SURROGATE_LOSS: Final = "vcpo_learner.estimator.loss:surrogate_coefficients"
"""The function that computes the stages above, `package.module:function`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The stages of one method's loss, and their numbers."""

    loss: str = SURROGATE_LOSS
    """Function that computes the coefficients, `package.module:function`."""
    baseline: Baseline | str = Baseline.GROUP_MEAN
    """A baseline of the table `vcpo.algo.advantage.BASELINES`, or `package.module:function`."""
    baseline_scope: BaselineScope = BaselineScope.GROUP
    """The trajectories that a baseline is computed from."""
    kl_penalty: KLPenalty = KLPenalty.NONE
    kl_coefficient: float = 0.0
    """tau or beta of the KL penalty."""
    is_whitened: bool = False
    """Whether advantages are brought to mean 0 and deviation 1 over the tokens of the batch."""
    has_critic: bool = False
    """Whether advantages come from a value head by V-trace."""
    overlong_share: float = 0.0
    """Last part of the longest response allowed, in which the reward falls linearly by 1."""
    group_filter: GroupFilter = GroupFilter.NONE
    """The groups that a step trains on."""
    weight: Weight = Weight.NONE
    weight_floor: float = 0.0
    """A ratio below the floor is replaced by 0."""
    weight_cap: float = math.inf
    """A ratio above the cap is replaced by the cap, or by 0 if `drops_above_cap`."""
    drops_above_cap: bool = False
    is_mask: bool = False
    """Whether ratios other than 0 are replaced by 1."""
    clipping: Clipping = Clipping.OPEN
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = math.inf
    """Ratio above which a negative advantage gives no gradient either."""
    threshold: float = 0.0
    """Bound that the clipping compares with."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    learning_rate_rule: LearningRateRule = LearningRateRule.NONE

    @property
    def largest_weight(self) -> float:
        return min(self.weight_cap, math.exp(LARGEST_LOG_RATIO))

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the `SETTINGS` that its stages read."""
        is_read = {
            "weight_cap": self.weight is not Weight.NONE,
            "weight_floor": self.weight is not Weight.NONE,
            "clip_low": self.clipping in _FIXED_BANDS,
            "clip_high": self.clipping in _FIXED_BANDS,
            "dual_clip": self.clipping not in (Clipping.OPEN, Clipping.TAPERED),
            "threshold": self.threshold > 0.0,
            "kl_coefficient": self.kl_coefficient > 0.0,
            "overlong_share": True,
        }
        return tuple(name for name in SETTINGS if is_read[name])

    @property
    def is_shipped(self) -> bool:
        return self.loss == SURROGATE_LOSS and isinstance(self.baseline, Baseline)

    @property
    def has_fixed_shape(self) -> bool:
        """Whether k_it = c_i a_it, with c_i known before any norm but for one number.

        The number is the baseline of those that share one.
        """
        is_open = self.clipping is Clipping.OPEN and not self.has_critic
        return is_open and self.is_shipped

    @property
    def has_sequence_terms(self) -> bool:
        """Whether the gradient is sum_i A_i W_i grad log pi(y_i), aggregated, with truncated W."""
        is_plain = self.has_fixed_shape and not self.is_whitened
        return is_plain and self.weight is Weight.SEQUENCE and not self.is_mask

    @property
    def is_separable(self) -> bool:
        """Whether k_it needs no more than the rewards and the tokens of its own trajectory."""
        return (
            self.is_shipped
            and numbers_wanted(BASELINES[Baseline(self.baseline)]) == ("rewards",)
            and self.clipping in _CLIPS_OF_ONE_TRAJECTORY
            and self.kl_penalty is KLPenalty.NONE
            and not self.is_whitened
            and not self.has_critic
        )


_SEQUENCE_TIS = LossConfig(weight=Weight.SEQUENCE, weight_cap=8.0)
_CLIPPED = LossConfig(
    baseline=Baseline.GRPO,
    weight=Weight.TOKEN,
    clipping=Clipping.CLIP,
    aggregation=Aggregation.TOKEN_MEAN,
)


LOSS_CONFIGS: Final[Mapping[Method, LossConfig]] = MappingProxyType(
    {
        Method.VCPO: replace(
            _SEQUENCE_TIS, baseline=Baseline.OPOB, learning_rate_rule=LearningRateRule.SQRT
        ),
        Method.VCPO2: replace(
            _SEQUENCE_TIS,
            baseline=Baseline.PESSIMISTIC,
            baseline_scope=BaselineScope.BATCH,
            learning_rate_rule=LearningRateRule.TRUST_REGION,
        ),
        Method.REINFORCE: LossConfig(baseline=Baseline.NONE),
        Method.SEQUENCE_TIS: _SEQUENCE_TIS,
        Method.TOKEN_TIS: LossConfig(
            weight=Weight.TOKEN, weight_cap=2.0, aggregation=Aggregation.TOKEN_MEAN
        ),
        Method.RLOO: replace(
            _SEQUENCE_TIS, baseline=Baseline.RLOO, aggregation=Aggregation.SEQUENCE_SUM
        ),
        Method.GRPO: replace(_CLIPPED, aggregation=Aggregation.SEQUENCE_MEAN),
        Method.DR_GRPO: replace(
            _CLIPPED, baseline=Baseline.GROUP_MEAN, aggregation=Aggregation.CONSTANT
        ),
        Method.REINFORCE_PLUS_PLUS: replace(_CLIPPED, baseline=Baseline.NONE, is_whitened=True),
        Method.PPO: replace(_CLIPPED, baseline=Baseline.GROUP_MEAN, dual_clip=3.0),
        Method.DAPO: replace(
            _CLIPPED, clip_high=0.28, group_filter=GroupFilter.DYNAMIC_SAMPLING, overlong_share=0.2
        ),
        Method.GSPO: replace(
            _CLIPPED,
            weight=Weight.GEOMETRIC,
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation=Aggregation.SEQUENCE_MEAN,
        ),
        Method.CISPO: replace(_CLIPPED, clipping=Clipping.OPEN, weight_cap=5.0),
        Method.ICE_POP: replace(
            _CLIPPED, clipping=Clipping.OPEN, weight_floor=0.5, weight_cap=5.0, drops_above_cap=True
        ),
        Method.SEQUENCE_MASK: replace(
            _SEQUENCE_TIS, weight_floor=0.5, weight_cap=2.0, drops_above_cap=True
        ),
        Method.GEOMETRIC_MASK: LossConfig(
            weight=Weight.GEOMETRIC,
            weight_floor=0.999,
            weight_cap=1.001,
            drops_above_cap=True,
            is_mask=True,
        ),
        Method.OPSM: replace(_CLIPPED, clipping=Clipping.OFF_POLICY_MASK, threshold=0.1),
        Method.M2PO: replace(_CLIPPED, clipping=Clipping.SECOND_MOMENT, threshold=0.04),
        Method.BAPO: replace(_CLIPPED, clipping=Clipping.BALANCED, threshold=0.4),
        Method.STAPO: replace(
            _CLIPPED, clip_high=0.28, clipping=Clipping.SPURIOUS, threshold=0.002
        ),
        Method.TBA: LossConfig(
            kl_penalty=KLPenalty.REFERENCE,
            kl_coefficient=0.012,
            aggregation=Aggregation.SEQUENCE_SUM,
        ),
        Method.AGRO: LossConfig(
            kl_penalty=KLPenalty.REFERENCE, kl_coefficient=0.1, aggregation=Aggregation.SEQUENCE_SUM
        ),
        Method.OPMD: LossConfig(aggregation=Aggregation.TOKEN_MEAN),
        Method.TOPR: LossConfig(clipping=Clipping.TAPERED, aggregation=Aggregation.SEQUENCE_SUM),
        Method.KIMI: LossConfig(
            kl_penalty=KLPenalty.BEHAVIOR, kl_coefficient=0.1, aggregation=Aggregation.SEQUENCE_SUM
        ),
        Method.DECOUPLED_PPO: replace(_CLIPPED, clipping=Clipping.OPEN, weight_cap=5.0),
        Method.A3PO: replace(_CLIPPED, clipping=Clipping.PROXIMAL_CLIP),
        Method.VTRACE: LossConfig(
            baseline=Baseline.NONE, has_critic=True, aggregation=Aggregation.TOKEN_MEAN
        ),
    }
)
"""The loss of every method."""
