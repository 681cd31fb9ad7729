"""VCPO in a training loop of one's own, on torch tensors: `docs/library.md`.

These names are stable. Tensors may have any dtype and device; they are read as float64. The module
itself does not import torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from vcpo.algo.advantage import BaselineScope, batch_advantages
from vcpo.algo.baseline import Baseline
from vcpo.algo.coverage import policy_coverage
from vcpo.algo.ess.importance_weights import WeightMoments, ess_ratio
from vcpo.algo.ess.trust_region import TARGET_ESS_RATIO, TrustRegion, horizon_of_lag
from vcpo.algo.ess.unit import EssKind, EssUnit, ess_reading
from vcpo.algo.ess.verdict import LearningRateRule, StepLimits, judge_step
from vcpo.algo.methods import LOSS_CONFIGS, Method

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = [
    "StepReport",
    "StepRule",
    "ess_ratio",
    "opob_advantages",
    "truncated_weights",
    "vcpo2_advantages",
]

_REGION: Final = TypeAdapter(TrustRegion)

WEIGHT_CAP: Final = LOSS_CONFIGS[Method.VCPO].weight_cap or 8.0
"""Largest importance weight of the gradient, 8."""


def truncated_weights(log_weights: Tensor, cap: float = WEIGHT_CAP) -> Tensor:
    """Return the weights that the gradient uses, min(w, cap), without a gradient of their own.

    log_weights: log pi - log mu of whole trajectories, nats, any shape.
    """
    return log_weights.detach().clamp(max=math.log(cap)).exp()


def opob_advantages(rewards: Tensor, squared_norms: Tensor) -> Tensor:
    """Return R - b* with the optimal baseline of each prompt's group, method `vcpo`.

    rewards: [prompts, responses].
    squared_norms: [prompts, responses] squared norms of each trajectory's gradient for an advantage
        of 1, with its truncated weight.
    Source: VCPO, arXiv 2602.17616, Eq. 7.
    """
    found = batch_advantages(rewards, Baseline.OPOB, squared_norms=squared_norms)
    return rewards.new_tensor(found)


def vcpo2_advantages(
    rewards: Tensor, squared_norms: Tensor, log_weights: Tensor, cap: float = WEIGHT_CAP
) -> Tensor:
    """Return R - C b* - (1 - C) min R with one baseline for the batch, method `vcpo2`.

    rewards, squared_norms: as for `opob_advantages`.
    log_weights: [prompts, responses] nats. C, the share of the policy that the batch shows, is the
        mean truncated weight, at most 1.
    """
    found = batch_advantages(
        rewards,
        Baseline.PESSIMISTIC,
        BaselineScope.BATCH,
        squared_norms=squared_norms,
        coverages=[policy_coverage(log_weights.flatten(), cap)],
    )
    return rewards.new_tensor(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step was taken at."""

    rate: float
    """Learning rate of the optimizer's first group of parameters; 0 if the step was skipped."""
    scale: float
    """Factor on the rates of all groups, in [0, 1]."""
    ess_ratio: float
    """Of the batch, in [1/B, 1]."""
    on_policy_ess_ratio: float
    """That a fresh batch of this size would have."""


class StepRule:
    """Takes an optimizer's steps at the rates of `vcpo2` or `vcpo`, and restores its rates.

    So a scheduler never sees the factor.

    max_lag_steps: Largest age of a trajectory, in steps; `vcpo2` keeps data of this age usable.
    method: `vcpo2`, whose rates start low and grow as data allows; or `vcpo`, sqrt(ESS / ESS_0).
    on_policy_ess_ratio: ESS_0 of fresh trajectories, in (0, 1]; below 1 if another engine samples.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_lag_steps: int,
        method: str = Method.VCPO2,
        on_policy_ess_ratio: float = 1.0,
    ) -> None:
        if method not in (Method.VCPO2, Method.VCPO):
            raise ValueError(f"method is {method!r}: give 'vcpo2' or 'vcpo'")
        self._rule = LOSS_CONFIGS[Method(method)].learning_rate_rule
        has_region = self._rule is LearningRateRule.TRUST_REGION
        self._optimizer = optimizer
        self._on_policy_ess_ratio = on_policy_ess_ratio
        horizon = horizon_of_lag(max_lag_steps) if has_region else 0
        self._region = TrustRegion(
            horizon_steps=horizon, target_ess_ratio=TARGET_ESS_RATIO if has_region else 1.0
        )

    def step(
        self, log_weights: Tensor, lags: Tensor, surprisal_nats: float | None = None
    ) -> StepReport:
        """Step the optimizer at the rate that this batch allows; arguments as for `rates`.

        Raises: NonFiniteWeightError, before any step, for a weight that is NaN or infinite.
        """
        with self.rates(log_weights, lags, surprisal_nats) as report:
            self._optimizer.step()
        return report

    @contextmanager
    def rates(
        self, log_weights: Tensor, lags: Tensor, surprisal_nats: float | None = None
    ) -> Iterator[StepReport]:
        """Give the optimizer, in the block, the rates that this batch allows; it steps there, once.

        log_weights: [B] log importance weights of the whole batch, over all processes, untruncated.
        lags: [B] ages of the trajectories, in steps.
        surprisal_nats: mean of -log mu over all sampled tokens, nats; uncertain tokens may drift
            further. None takes them for sure.
        Raises: NonFiniteWeightError for a weight that is NaN or infinite.
        """
        nats, size = -math.log(self._on_policy_ess_ratio), len(log_weights)
        unit = EssUnit(
            kind=EssKind.SEQUENCE,
            blocks=((1,),) * size,
            exponent=1.0,
            on_policy_ess_ratio=self._on_policy_ess_ratio,
            mismatch_nats=nats,
        )
        reading = ess_reading(unit, WeightMoments.of(log_weights))
        missing_nats = math.log(reading.on_policy_ess_ratio / reading.ess_ratio)
        by_lag = Counter(int(lag) for lag in lags.tolist())
        read = self._region.read(None if surprisal_nats is None else float(surprisal_nats))
        region = read.observe(missing_nats, by_lag, reading.chance_nats, size, nats)
        limits = StepLimits(rule=self._rule, target_ess_ratio=region.target)
        verdict = judge_step(
            reading.ess_ratio,
            reading.on_policy_ess_ratio,
            limits,
            chance_nats=reading.chance_nats,
        )
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        base = float(rates[0])
        allowed = region.largest_rate(base)
        scale = verdict.scale * (allowed / base if base > 0.0 else 1.0)
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * scale
            yield StepReport(
                rate=base * scale,
                scale=scale,
                ess_ratio=reading.ess_ratio,
                on_policy_ess_ratio=reading.on_policy_ess_ratio,
            )
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._region = region.step(base * scale, allowed)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next rates depend on, in types that JSON has; save it with the model."""
        state: dict[str, Any] = _REGION.dump_python(self._region, mode="json")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; a rule that starts anew would grow to the whole rate."""
        self._region = self._region.continue_from(_REGION.validate_python(state))
