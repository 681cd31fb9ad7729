"""Limits, signals and a small plant for the tests of the control loop."""

import random
from dataclasses import dataclass, field

from tests.fixtures.signals import run_signals_of
from vcpo.api import VCPORunSpec
from vcpo.control.decision import ControlDecision, ControlState, decide
from vcpo.control.signals import RunSignals

BATCH = 16


def spec_of(
    *groups: tuple[str, int, int],
    max_policy_lag_steps: int = 8,
    ess_floor_ratio: float = 0.1,
    guarded: bool = True,
) -> VCPORunSpec:
    """A run's defaults, with groups as (name, least, most)."""
    document = {
        "model": {"name": "m"},
        "environment": {"name": "countdown"},
        "steps": 3,
        "algorithm": {"maxPolicyLagSteps": max_policy_lag_steps},
        "rollouts": [
            {"name": name, "minReplicas": least, "maxReplicas": most}
            for name, least, most in groups or (("main", 1, 8),)
        ],
        "control": {"essFloorRatio": ess_floor_ratio},
        "health": {"enabled": guarded},
    }
    return VCPORunSpec.model_validate(document)


def signals(**changes: object) -> RunSignals:
    """A healthy, balanced run after 10 steps; 9 batches are the most that a lag of 8 admits."""
    chosen = {
        "step": 10,
        "policy_version": 10,
        "ess_ratio_mean": 0.6,
        "on_policy_ess_ratio": 0.8,
        "lag_p50": 2,
        "buffered": 2 * BATCH,
        "in_flight": 2 * BATCH,
        "batch_trajectories": BATCH,
        "lag_limit_steps": 8,
        "learner_idle_ratio": 0.1,
        "ready_workers": {"main": 2},
    }
    return run_signals_of(**{**chosen, **changes})


def starving_signals(**changes: object) -> RunSignals:
    """The learner waits half of the time and little work is out."""
    return signals(**{"learner_idle_ratio": 0.5, "buffered": 0, **changes})


def saturated_signals(**changes: object) -> RunSignals:
    """The learner never waits and all the work that a lag of 8 admits is out."""
    return signals(**{"learner_idle_ratio": 0.0, "buffered": 7 * BATCH, **changes})


@dataclass
class Plant:
    """A run that takes a step between two decisions and needs so many workers to keep busy."""

    spec: VCPORunSpec
    needed_workers: float
    relative_ess_ratio: float = 0.9
    noise: random.Random = field(default_factory=lambda: random.Random(0))
    step: int = 0
    now_s: float = 0.0
    poll_s: float = 2.0

    def __post_init__(self) -> None:
        self.state = ControlState.start(self.spec, now_s=self.now_s)
        self.workers = dict(self.state.fleet.replicas)

    def advance(self) -> ControlDecision:
        """Take a step, measure with 10 % noise, decide; workers are ready at the next step."""
        self.step += 1
        self.now_s += self.poll_s
        seen = self.measure()
        decision, self.state = decide(self.spec, self.state, seen, self.now_s)
        self.workers = dict(decision.replicas)
        return decision

    def measure(self) -> RunSignals:
        served_ratio = sum(self.workers.values()) / self.needed_workers
        lag_steps = self.state.throttle.lag_limit_steps
        out = round((lag_steps + 1) * BATCH * (1.0 if served_ratio > 1.0 else 0.5))
        return signals(
            step=self.step,
            policy_version=self.step,
            ess_ratio_mean=min(1.0, self.noisy(0.8 * self.relative_ess_ratio)),
            lag_p50=min(1, lag_steps),
            buffered=out // 2,
            in_flight=out - out // 2,
            learner_idle_ratio=min(1.0, self.noisy(max(0.0, 1.0 - served_ratio))),
            ready_workers=self.workers,
        )

    def noisy(self, value: float) -> float:
        return value * self.noise.uniform(0.9, 1.1)
