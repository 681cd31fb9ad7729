"""The health of a run after each step: its early warning, its rewards, and what its guards do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from vcpo.algo.health.collapse import RewardWatch
from vcpo.algo.health.early_warning import EarlyWarning, StepHealth, WarningLevel
from vcpo.algo.health.guards import GuardPolicy, RateBackoff, RollbackNeed, Rollbacks
from vcpo.api import VCPORunSpec
from vcpo_learner.update.batch_decision import StepDecision
from vcpo_learner.update.result import BatchGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class _HealthState:
    early_warning: EarlyWarning
    rewards: RewardWatch
    rate_backoff: RateBackoff
    rollbacks: Rollbacks


_STATE = TypeAdapter(_HealthState)


def _dump(state: _HealthState) -> dict[str, Any]:
    found: dict[str, Any] = _STATE.dump_python(state, mode="json")
    return found


class RunHealth:
    """Early warning and rewards of a run, and what its guards leave. Owner: the tensor thread."""

    def __init__(self, spec: VCPORunSpec) -> None:
        self.guards: GuardPolicy = spec.health.guards
        self._warning = EarlyWarning()
        self.rewards = RewardWatch()
        self.backoff = RateBackoff()
        """Lowers the learning rate of the next steps."""
        self.rollbacks = Rollbacks()

    @property
    def level(self) -> WarningLevel:
        return self._warning.level

    @property
    def score(self) -> float:
        return self._warning.score

    @property
    def rollback_need(self) -> RollbackNeed:
        return self.guards.rollback_need(
            self.level,
            has_collapsed=self.rewards.has_collapsed,
            num_rollbacks=self.rollbacks.number,
        )

    @property
    def is_good(self) -> bool:
        return self.guards.is_good(self.level, has_collapsed=self.rewards.has_collapsed)

    def observe(
        self,
        decision: StepDecision,
        batch: BatchGradient,
        *,
        gradient_norm: float,
        rewards: Mapping[str, Sequence[float]],
    ) -> None:
        """Take in a decided step, before it is taken.

        rewards: of its trajectories, by worker.
        gradient_norm: 0 counts as unknown, as there is no gradient if all rewards are equal.
        """
        reading = decision.reading
        step = StepHealth(
            relative_ess=reading.ess_ratio / reading.on_policy_ess_ratio,
            ess=reading.ess_ratio * len(batch.summary.log_weights),
            gradient_norm=gradient_norm or None,
        )
        self._observe(step, rewards)

    def observe_refusal(self, rewards: Mapping[str, Sequence[float]]) -> None:
        self._observe(StepHealth(relative_ess=0.0), rewards)

    def window_fields(self) -> dict[str, Any]:
        last = self.rewards.last
        if last is None:
            return {}
        return {"reward_window_mean": last.value, "reward_window_error": last.error}

    def state_dict(self) -> dict[str, Any]:
        return _dump(
            _HealthState(
                early_warning=self._warning,
                rewards=self.rewards,
                rate_backoff=self.backoff,
                rollbacks=self.rollbacks,
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = _STATE.validate_python(state)
        self._warning, self.rewards = saved.early_warning, saved.rewards
        self.rollbacks = saved.rollbacks
        # A spec that was changed to keep the rate resets it.
        if self.guards.lowers_rate:
            self.backoff = saved.rate_backoff

    def rolled_back_state(self, saved: Mapping[str, Any], *, version: int) -> dict[str, Any]:
        """Return the `state_dict` of a run that goes back to a saved one.

        Warning and rewards are the saved ones. Backoff and rollbacks go on from here.

        version: the policy version that the rollback publishes.
        """
        return _dump(
            replace(
                _STATE.validate_python(saved),
                rate_backoff=self.backoff.after_rollback(),
                rollbacks=self.rollbacks.after(version),
            )
        )

    def _observe(self, step: StepHealth, rewards: Mapping[str, Sequence[float]]) -> None:
        self._warning = self._warning.observe(step)
        self.rewards = self.rewards.observe(rewards)
        self.backoff = self.backoff.observe(
            is_warned=self.guards.answers(self.level), is_well=self.level is WarningLevel.OK
        )
