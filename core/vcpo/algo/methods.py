r"""Methods of the field by name, each as a recipe of stages.

One optimizer step is taken on each batch. At the parameters it starts from, the gradient of every
surrogate loss is linear in the gradients of the sampled tokens' log-probabilities,

    grad L = sum_{i,t} k_it grad log pi(y_it),    k_it = - A_it a_it g_it,

so that a method is no more than a way to find k_it from a batch's numbers:

| stage       | symbol | what it is                                                                |
|-------------|--------|---------------------------------------------------------------------------|
| filter      |        | which groups are trained on at all                                        |
| advantage   | A_it   | reward or residual over a baseline, or V-trace's advantage                |
| weight      | a_it   | correction for the sampler's policy, a matter of one trajectory alone     |
| gate        | g_it   | what trust regions and masks let through; may ask for A and for the batch |
| aggregation | a_it   | what tokens and trajectories count against each other                     |
| rule        |        | how the ESS of the batch scales the learning rate                         |

The clipped and masked methods compare the learner with the sampler directly, u = pi/mu: at the
start of a step the "old" policy of PPO is the learner itself, and its ratio to the learner is 1.

`docs/methods.md` has a row with formula and source for each. `RECIPES` is the same in numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from vcpo.algo.baseline import Baseline
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo.algo.ess.learning_rate import LearningRateRule


class Method(StrEnum):
    """A named way from a batch to its gradient."""

    VCPO = "vcpo"
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
    M2PO_ALL_TOKENS = "m2poAllTokens"
    M2PO_BOUNDS = "m2poBounds"
    BAPO = "bapo"
    BAPO_PUBLISHED = "bapoPublished"
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
    """Which ratio of learner to sampler a token's gradient is multiplied by."""

    NONE = "none"
    TOKEN = "token"
    """u_t = pi/mu of the token."""
    SEQUENCE = "sequence"
    """W, the product of u over the trajectory."""
    GEOMETRIC = "geometric"
    """s = W^(1/T)."""


class Gate(StrEnum):
    """What of a gradient is let through."""

    OPEN = "open"
    CLIP = "clip"
    """PPO's: nothing where the ratio already left the band in the advantage's direction."""
    PROXIMAL_CLIP = "proximalClip"
    """The same on pi over a policy between sampler and learner (A-3PO)."""
    OFF_POLICY_MASK = "offPolicyMask"
    """`CLIP`, and no sequence with a negative advantage that the learner left behind (OPSM)."""
    SECOND_MOMENT = "secondMoment"
    """The largest log ratios among tokens pushed further out are dropped (M2PO, paper)."""
    SECOND_MOMENT_ALL = "secondMomentAll"
    """The same among all tokens, then `CLIP` (M2PO as in AReaL)."""
    SECOND_MOMENT_BOUNDS = "secondMomentBounds"
    """PPO's with a band found from the second moment (M2PO, official code)."""
    BALANCED = "balanced"
    """PPO's with a band found from the share of positive gradient (BAPO)."""
    BALANCED_PUBLISHED = "balancedPublished"
    """The same with the search of BAPO's paper, which counts clipped tokens too."""
    SPURIOUS = "spurious"
    """`CLIP`, and no rewarded token that is improbable though the policy is sure (STAPO)."""
    TAPERED = "tapered"
    """Negative trajectories count min(1, W), positive ones in full (TOPR)."""


class Residual(StrEnum):
    """What is taken off a reward for leaving another policy."""

    NONE = "none"
    REFERENCE = "reference"
    """tau times the log ratio of learner to reference, before the baseline (TBA, AGRO)."""
    SAMPLER = "sampler"
    """tau times the log ratio of learner to sampler, after the baseline (Kimi)."""


class GroupFilter(StrEnum):
    """Which groups a step is taken on."""

    NONE = "none"
    """All, in the order in which they are complete."""
    INFORMATIVE = "informative"
    """Those whose rewards differ; the others are dropped and replaced (dynamic sampling)."""


class Aggregation(StrEnum):
    """What tokens and trajectories count against each other."""

    SEQUENCE_MEAN = "sequenceMean"
    """1/(B T_i): every trajectory counts alike."""
    TOKEN_MEAN = "tokenMean"
    """1/sum_i T_i: every token of the batch counts alike."""
    SEQUENCE_SUM = "sequenceSum"
    """1/B: tokens count in full."""
    CONSTANT = "constant"
    """1/(B L) with L the longest answer allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The stages of one method, and their numbers."""

    baseline: Baseline = Baseline.GROUP_MEAN
    residual: Residual = Residual.NONE
    regularization: float = 0.0
    """tau or beta of the residual."""
    is_whitened: bool = False
    """Advantages are brought to mean 0 and deviation 1 over the tokens of the batch."""
    has_critic: bool = False
    """Advantages come from a value head by V-trace."""
    overlong_share: float = 0.0
    """Last part of the longest answer allowed in which the reward falls by 1 linearly."""
    group_filter: GroupFilter = GroupFilter.NONE
    """Which groups a step is taken on."""
    weight: Weight = Weight.NONE
    weight_floor: float = 0.0
    """A ratio below it counts 0."""
    weight_cap: float = math.inf
    """A ratio above it counts as much as the cap, or 0 when `drops_above_cap`."""
    drops_above_cap: bool = False
    is_mask: bool = False
    """What the ratio leaves in counts 1 instead of the ratio."""
    gate: Gate = Gate.OPEN
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = math.inf
    """Ratio above which a negative advantage gives no gradient, too."""
    threshold: float = 0.0
    """What the gate compares with."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    learning_rate_rule: LearningRateRule = LearningRateRule.NONE

    @property
    def largest_weight(self) -> float:
        """The cap, or where ratios are held so that nothing overflows when there is none."""
        return min(self.weight_cap, math.exp(LARGEST_LOG_RATIO))

    @property
    def has_fixed_shape(self) -> bool:
        """Whether k_it = c_i a_it, with c_i known from rewards and norms of i's group."""
        return self.gate is Gate.OPEN and not self.has_critic


_SEQUENCE_TIS = Recipe(weight=Weight.SEQUENCE, weight_cap=8.0)
_CLIPPED = Recipe(
    baseline=Baseline.GRPO,
    weight=Weight.TOKEN,
    gate=Gate.CLIP,
    aggregation=Aggregation.TOKEN_MEAN,
)


RECIPES: Final[Mapping[Method, Recipe]] = MappingProxyType(
    {
        Method.VCPO: replace(
            _SEQUENCE_TIS, baseline=Baseline.OPOB, learning_rate_rule=LearningRateRule.SQRT
        ),
        Method.REINFORCE: Recipe(baseline=Baseline.NONE),
        Method.SEQUENCE_TIS: _SEQUENCE_TIS,
        Method.TOKEN_TIS: Recipe(
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
            _CLIPPED, clip_high=0.28, group_filter=GroupFilter.INFORMATIVE, overlong_share=0.2
        ),
        Method.GSPO: replace(
            _CLIPPED,
            weight=Weight.GEOMETRIC,
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation=Aggregation.SEQUENCE_MEAN,
        ),
        Method.CISPO: replace(_CLIPPED, gate=Gate.OPEN, weight_cap=5.0),
        Method.ICE_POP: replace(
            _CLIPPED, gate=Gate.OPEN, weight_floor=0.5, weight_cap=5.0, drops_above_cap=True
        ),
        Method.SEQUENCE_MASK: replace(
            _SEQUENCE_TIS, weight_floor=0.5, weight_cap=2.0, drops_above_cap=True
        ),
        Method.GEOMETRIC_MASK: Recipe(
            weight=Weight.GEOMETRIC,
            weight_floor=0.999,
            weight_cap=1.001,
            drops_above_cap=True,
            is_mask=True,
        ),
        Method.OPSM: replace(_CLIPPED, gate=Gate.OFF_POLICY_MASK, threshold=0.1),
        Method.M2PO: replace(_CLIPPED, gate=Gate.SECOND_MOMENT, threshold=0.04),
        Method.M2PO_ALL_TOKENS: replace(_CLIPPED, gate=Gate.SECOND_MOMENT_ALL, threshold=0.04),
        Method.M2PO_BOUNDS: replace(_CLIPPED, gate=Gate.SECOND_MOMENT_BOUNDS, threshold=0.04),
        Method.BAPO: replace(_CLIPPED, gate=Gate.BALANCED, threshold=0.4),
        Method.BAPO_PUBLISHED: replace(_CLIPPED, gate=Gate.BALANCED_PUBLISHED, threshold=0.4),
        Method.STAPO: replace(_CLIPPED, clip_high=0.28, gate=Gate.SPURIOUS, threshold=0.002),
        Method.TBA: Recipe(
            residual=Residual.REFERENCE,
            regularization=0.012,
            aggregation=Aggregation.SEQUENCE_SUM,
        ),
        Method.AGRO: Recipe(
            residual=Residual.REFERENCE, regularization=0.1, aggregation=Aggregation.SEQUENCE_SUM
        ),
        Method.OPMD: Recipe(aggregation=Aggregation.TOKEN_MEAN),
        Method.TOPR: Recipe(gate=Gate.TAPERED, aggregation=Aggregation.SEQUENCE_SUM),
        Method.KIMI: Recipe(
            residual=Residual.SAMPLER, regularization=0.1, aggregation=Aggregation.SEQUENCE_SUM
        ),
        Method.DECOUPLED_PPO: replace(_CLIPPED, gate=Gate.OPEN, weight_cap=5.0),
        Method.A3PO: replace(_CLIPPED, gate=Gate.PROXIMAL_CLIP),
        Method.VTRACE: Recipe(
            baseline=Baseline.NONE, has_critic=True, aggregation=Aggregation.TOKEN_MEAN
        ),
    }
)
"""The stages of every method."""
