"""The health of a run after each step: its early warning, and the learning rate that it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vcpo.algo import EarlyWarning, RateBackoff, StepHealth, WarningLevel
from vcpo.spec import VCPORunSpec
from vcpo_learner.update.batch_decision import StepDecision
from vcpo_learner.update.pending_step import BatchGradient


class RunHealth:
    """Early warning of a run, and backoff of its learning rate. Owner: the tensor thread."""

    def __init__(self, spec: VCPORunSpec) -> None:
        self._warning = EarlyWarning()
        self.backoff = RateBackoff()
        """Lowers the learning rate of the next steps."""
        self._slows_on_critical = spec.control.on_critical.slows

    @property
    def level(self) -> WarningLevel:
        """Level of the early warning."""
        return self._warning.level

    @property
    def score(self) -> float:
        """Score of the early warning, in [0, 1]."""
        return self._warning.score

    def observe(self, decision: StepDecision, batch: BatchGradient, gradient_norm: float) -> None:
        """Take in a decided step.

        gradient_norm: 0 counts as unknown, as there is no gradient if all rewards are equal.
        """
        reading = decision.reading
        self._observe(
            StepHealth(
                relative_ess=reading.ess_ratio / reading.on_policy_ess_ratio,
                ess=reading.ess_ratio * len(batch.summary.log_weights),
                kl_per_token=batch.sums.kl_per_token,
                gradient_norm=gradient_norm or None,
            )
        )

    def observe_refusal(self) -> None:
        """Take in a step with a weight that is not finite."""
        self._observe(StepHealth(relative_ess=0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step's health depends on, for a checkpoint."""
        return {**self._warning.to_dict(), "rate_backoff": self.backoff.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises: ValueError if the state has another form or a number is out of range.
        """
        self._warning = self._warning.restore(state)
        # Older checkpoints have no backoff. A spec that was changed to keep the rate resets it.
        if self._slows_on_critical and "rate_backoff" in state:
            self.backoff = RateBackoff.from_dict(state["rate_backoff"])

    def _observe(self, step: StepHealth) -> None:
        self._warning = self._warning.observe(step)
        if self._slows_on_critical:
            self.backoff = self.backoff.observe(self._warning.level)
