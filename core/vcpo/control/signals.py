"""The signals of a run: what its learner reports, and what everybody else judges by and shows.

    learner's message  --.                .--> vcpo.control.decide
    its scraped metrics --+--> RunSignals -+--> the operator's status, conditions and commands
    its journal        --'                '--> the local host's views

`vcpo.learner_control`, `vcpo_operator.signals.prometheus` and `vcpo.report.recorded_run` fill it.
Nobody copies it: what reads signals takes the whole record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.effective_rate import EffectiveRate
from vcpo.records.reasons import RunPhase

WINDOW_STEPS = 10
"""Number of recent steps in the learner's window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSignals:
    """What is known of one rollout worker."""

    in_flight: int
    """Trajectories that it generates now."""
    silent_s: float
    """Seconds since its last contact."""
    accepted: int = 0
    """Trajectories accepted from it since its registration; 0 from Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSignals:
    """Signals of a run at one moment; None if the learner has not measured the value yet.

    Raises: ValueError naming the field that is out of range or not finite. A caller that reads
    signals from outside treats this as no signals, so invalid signals change nothing.
    """

    phase: RunPhase = RunPhase.RUNNING
    step: int
    """Optimizer steps taken, >= 0."""
    policy_version: int
    """The learner's policy version, >= 0."""

    ess_ratio: float | None = None
    """ESS ratio of the last step, in [0, 1]."""
    ess_ratio_mean: float | None = None
    """Mean ESS ratio over the window of recent steps, in [0, 1]."""
    ess_ratio_low: float | None = None
    """Low percentile of the ESS ratio over the same window, in [0, 1]."""
    on_policy_ess_ratio: float = 1.0
    """ESS ratio at lag 0, in (0, 1]; the reference of the other three."""
    learning_rate: float | None = None
    """Learning rate of the last step that made an update, >= 0."""
    learning_rate_schedule: float | None = None
    """Factor of warm-up and schedule on it, in [0, 1]."""
    learning_rate_scale: float | None = None
    """Factor of ESS or trust region on it, in [0, 1]."""
    learning_rate_backoff: float | None = None
    """Factor of warnings and rollbacks on it, in [0, 1]."""
    warning_score: float | None = None
    """Early warning of a collapse after the last step: severity of the worst signal, in [0, 1]."""
    warning_level: WarningLevel | None = None
    """Level of the early warning after the last step."""
    rollback: str = ""
    """Clause that names the step and the checkpoint of a rollback in the last steps, and why; empty
    if there was none."""
    reward_mean: float | None = None
    """Mean reward of recent steps; of the last step from Prometheus and from the journal."""
    accuracy: float | None = None
    """Mean reward of the newest evaluation."""

    cut_responses_ratio: float | None = None
    """Share of the last step's responses that reached the largest number of new tokens; in [0, 1].
    None from Prometheus, as are the next two."""
    equal_groups_ratio: float | None = None
    """Share of the last step's groups whose rewards are all equal, in [0, 1]."""
    prompt_tokens_mean: float | None = None
    """Mean length of the last step's prompts, in tokens, >= 0."""

    lag_p50: int | None = None
    """Median lag of the tokens of the last step, in policy versions, >= 0."""
    lag_max: int | None = None
    """Largest lag of a token of the last step, in policy versions, >= 0."""
    lag_limit_steps: int
    """Lag limit that the learner applies now, in policy versions, >= 0."""
    buffered: int = 0
    """Trajectories that wait for training, >= 0."""
    in_flight: int = 0
    """Trajectories that workers are generating, >= 0."""
    batch_trajectories: int
    """Trajectories consumed by one optimizer step, >= 1."""
    learner_idle_ratio: float = 0.0
    """Share of the window in which the learner waited for data, in [0, 1]."""
    consumed_per_s: float = 0.0
    """Trajectories trained on per second, >= 0; 0 from Prometheus."""
    tokens_per_s: float | None = None
    """Response tokens accepted per second, >= 0; None from Prometheus."""
    ready_workers: Mapping[str, int] = field(default_factory=dict)
    """Registered workers by rollout group; a group without an entry has none."""
    workers: Mapping[str, WorkerSignals] = field(default_factory=dict)
    """Workers by id, which in a cluster is the name of the pod."""

    failure: str = ""
    """Why the learner failed the run, in a sentence; empty unless it has."""
    failures_in_a_row: int = 0
    """Generations that failed since the last one that succeeded."""
    latest_generation_failure: str = ""
    """Error of the latest of these failures; empty without failures, and from Prometheus."""
    set_aside: str = ""
    """Sentence that names the workers which the learner has just set aside; empty if none, and from
    Prometheus."""
    mismatch: str = ""
    """How far workers and learner are from one policy, in sentences; empty while they agree, and
    from Prometheus."""
    no_update: str = ""
    """Why the last steps, or all steps, made no update, in a sentence; empty if they did."""
    has_never_updated: bool = False
    """Whether no step of the run made an update."""
    collapse: str = ""
    """How the run collapsed, in sentences; empty unless it took all steps and did not recover. From
    Prometheus it is always empty."""
    lost_changes: int = 0
    """Committed changes that the learner did not find in its redo log when it started."""

    since_step_s: float | None = None
    """Seconds from the last step to this report; None from Prometheus."""
    age_s: float = 0.0
    """Seconds since the learner reported this, >= 0."""
    is_fresh: bool = True
    """Whether the signals are returned for the first time. The operator sends commands only on
    fresh signals, so that it does not repeat a command at every reconcile while no new ones
    arrive."""
    is_silent: bool = False
    """Whether the learner has not answered a later call."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float):
                _require_range(item.name, value)
        for group, workers in self.ready_workers.items():
            if workers < 0:
                raise ValueError(f"ready_workers['{group}'] must be at least 0, not {workers}")

    @property
    def relative_ess_ratio(self) -> float | None:
        """ESS ratio of the last step as a share of the on-policy one, in [0, 1]."""
        return self._relative(self.ess_ratio)

    @property
    def relative_ess_ratio_mean(self) -> float | None:
        """Mean ESS ratio as a share of the on-policy one, in [0, 1]."""
        return self._relative(self.ess_ratio_mean)

    @property
    def relative_ess_ratio_low(self) -> float | None:
        """Low percentile of the ESS ratio as a share of the on-policy one, in [0, 1]."""
        return self._relative(self.ess_ratio_low)

    @property
    def effective_rate(self) -> EffectiveRate | None:
        """Learning rate of the last step that made an update, and its factors."""
        factors = self.learning_rate_schedule, self.learning_rate_scale, self.learning_rate_backoff
        schedule, scale, backoff = factors
        if self.learning_rate is None or schedule is None or scale is None or backoff is None:
            return None
        return EffectiveRate(
            rate=self.learning_rate, schedule=schedule, scale=scale, backoff=backoff
        )

    @property
    def outstanding(self) -> int:
        """Trajectories that are leased or buffered."""
        return self.buffered + self.in_flight

    @property
    def step_age_s(self) -> float | None:
        """Seconds since the last step ended."""
        return None if self.since_step_s is None else self.since_step_s + self.age_s

    @property
    def has_work(self) -> bool:
        """Whether the learner trains, or drains and still waits for trajectories."""
        has_work_in_flight = self.phase is RunPhase.DRAINING and self.in_flight > 0
        return self.phase is RunPhase.RUNNING or has_work_in_flight

    def at_age(self, age_s: float) -> RunSignals:
        """Return the signals at an age of `age_s` seconds, no longer fresh."""
        return replace(self, age_s=age_s, is_fresh=False)

    def has_contact(self, within_s: float) -> bool:
        """Whether the learner itself reported within the last `within_s` seconds."""
        return not self.is_silent and self.age_s <= within_s

    def workers_in_contact(self, within_s: float) -> frozenset[str]:
        """Return the workers that were in contact with the learner within `within_s` seconds."""
        if not self.has_contact(within_s):
            return frozenset()
        workers, age_s = self.workers.items(), self.age_s
        return frozenset(name for name, each in workers if each.silent_s + age_s <= within_s)

    def is_from_after(self, start_s: float, *, now_s: float) -> bool:
        """Whether the learner reported this at `start_s` or later; both are Unix times."""
        return now_s - self.age_s >= start_s

    def _relative(self, ess_ratio: float | None) -> float | None:
        return None if ess_ratio is None else min(1.0, ess_ratio / self.on_policy_ess_ratio)


_SIGNED = {"reward_mean", "accuracy"}
_SHARES = {
    "ess_ratio",
    "ess_ratio_mean",
    "ess_ratio_low",
    "on_policy_ess_ratio",
    "learning_rate_schedule",
    "learning_rate_scale",
    "learning_rate_backoff",
    "warning_score",
    "cut_responses_ratio",
    "equal_groups_ratio",
    "learner_idle_ratio",
}


def _require_range(name: str, value: float) -> None:
    if name in _SIGNED:
        inside, allowed = math.isfinite(value), "finite"
    elif name in _SHARES:
        inside, allowed = 0.0 <= value <= 1.0, "in [0, 1]"
    else:
        inside, allowed = 0 <= value < math.inf, "at least 0 and finite"
    if not inside:
        raise ValueError(f"{name} must be {allowed}, not {value}")
    if value == 0 and name in {"on_policy_ess_ratio", "batch_trajectories"}:
        raise ValueError(f"{name} must be above 0, not {value}")
