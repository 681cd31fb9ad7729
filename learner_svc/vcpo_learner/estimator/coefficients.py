"""All stages together: k_it = -A_it a_it g_it of every token of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vcpo.algo import LossConfig, NonFiniteWeightError
from vcpo_learner.estimator.gates import gate
from vcpo_learner.estimator.record import BatchRecord
from vcpo_learner.estimator.shaping import token_advantages
from vcpo_learner.estimator.weights import local_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCoefficients:
    """What each token's log-probability is multiplied by in the loss."""

    values: Tensor
    """[B, width] float64; 0 outside the mask."""
    masked_share: float
    """Share of tokens that the gate left nothing of, in [0, 1]."""


def token_coefficients(
    record: BatchRecord, advantages: Sequence[float], config: LossConfig
) -> TokenCoefficients:
    """Coefficients of a batch whose trajectories have these advantages after the baseline.

    advantages: [B]. A token whose weight or gate is 0 has coefficient 0 whatever its advantage.
    Raises: NonFiniteWeightError, with the trajectory's index, when one is not a number.
    """
    mask = record.logprobs.mask
    per_token = token_advantages(advantages, record, config)
    gates = gate(record, per_token, config)
    factors = local_weights(record.logprobs, config, record.size) * gates
    values = (-per_token * factors).masked_fill(factors == 0.0, 0.0)
    for index, row in enumerate(values.isfinite().all(dim=1).tolist()):
        if not row:
            raise NonFiniteWeightError("coefficients", index, float(values[index].sum()))
    masked_share = float((gates[mask] == 0.0).double().mean())
    return TokenCoefficients(values=values, masked_share=masked_share)
