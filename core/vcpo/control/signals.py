"""The signals of a run: what its learner reports, and what everybody else judges by and shows.

    learner's message  --.                .--> vcpo.control.decide
    its scraped metrics --+--> RunSignals -+--> the operator's status, conditions and commands
    its journal        --'                '--> the local host's views

The record of the last step holds the numbers of a step; a new one needs no line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.reasons import RunPhase
from vcpo.records.step_record import Count, EffectiveRate, NonNegative, Share, StepRecord

WINDOW_STEPS = 10
"""Number of recent steps in the learner's window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSignals:
    """What is known of one rollout worker."""

    in_flight: int
    silent_s: float
    """Seconds since its last contact."""
    accepted: int = 0
    """Trajectories accepted from it since its registration; 0 from Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSignals:
    """Signals of a run at one moment: the record of its last step, and its state since."""

    last: StepRecord | None = None
    """None before the first step. From Prometheus it holds the numbers that are metrics."""
    phase: RunPhase = RunPhase.RUNNING
    policy_version: Count
    """The learner's policy version; ahead of the last step while it is published."""
    lag_limit_steps: Count
    """Lag limit that the learner applies now, in policy versions."""
    batch_trajectories: Annotated[int, Field(ge=1)]
    buffered: Count = 0
    in_flight: Count = 0
    learner_idle_ratio: Share = 0.0
    """Share of the window in which the learner waited for data."""
    consumed_per_s: NonNegative = 0.0
    """Trajectories trained on per second; 0 from Prometheus."""
    accuracy: float | None = None
    """Mean reward of the newest evaluation."""
    ready_workers: Mapping[str, Count] = field(default_factory=dict)
    """Registered workers by rollout group; a group without an entry has none."""
    workers: Mapping[str, WorkerSignals] = field(default_factory=dict)
    """Workers by id, which in a cluster is the name of the pod."""

    failure: str = ""
    """Why the learner failed the run, in a sentence; empty unless it has."""
    failures_in_a_row: Count = 0
    """Generations that failed since the last one that succeeded."""
    generation_failure: str = ""
    """Error of the latest of these failures. Empty without one, and from Prometheus; so are the
    next four."""
    set_aside: str = ""
    """Sentence that names the workers which the learner has just set aside."""
    mismatch: str = ""
    """How far workers and learner are from one policy, in sentences; empty while they agree."""
    rollback: str = ""
    """Clause that names the step and the checkpoint of a rollback in the last steps, and why."""
    collapse: str = ""
    """How the run collapsed, in sentences; empty unless it took all steps and did not recover."""
    lost_changes: Count = 0
    """Committed changes that the learner did not find in its redo log when it started."""

    since_step_s: NonNegative | None = None
    """Seconds from the last step to this report; None from Prometheus."""
    age_s: NonNegative = 0.0
    """Seconds since the learner reported this."""
    is_fresh: bool = True
    """Whether the signals are returned for the first time. The operator sends commands only on
    fresh signals, so that it does not repeat a command at every reconcile while no new ones
    arrive."""
    is_silent: bool = False
    """Whether the learner has not answered a later call."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    @property
    def step(self) -> int:
        return 0 if self.last is None else self.last.step

    @property
    def warning_level(self) -> WarningLevel | None:
        return None if self.last is None else WarningLevel(self.last.warning_level)

    @property
    def relative_ess_ratio(self) -> float | None:
        return self._relative(self.last.ess_ratio or None if self.last else None)

    @property
    def relative_ess_ratio_mean(self) -> float | None:
        return self._relative(self.last.ess_ratio_mean if self.last else None)

    @property
    def relative_ess_ratio_low(self) -> float | None:
        return self._relative(self.last.ess_ratio_low if self.last else None)

    @property
    def effective_rate(self) -> EffectiveRate | None:
        return None if self.last is None else self.last.effective_rate

    def has_never_updated(self, total_steps: int) -> bool:
        return self.last is not None and 0 < total_steps <= self.last.skipped_steps

    @property
    def outstanding(self) -> int:
        return self.buffered + self.in_flight

    @property
    def has_work(self) -> bool:
        has_work_in_flight = self.phase is RunPhase.DRAINING and self.in_flight > 0
        return self.phase is RunPhase.RUNNING or has_work_in_flight

    def at_age(self, age_s: float) -> RunSignals:
        return replace(self, age_s=age_s, is_fresh=False)

    def has_contact(self, within_s: float) -> bool:
        return not self.is_silent and self.age_s <= within_s

    def workers_in_contact(self, within_s: float) -> frozenset[str]:
        if not self.has_contact(within_s):
            return frozenset()
        workers, age_s = self.workers.items(), self.age_s
        return frozenset(name for name, each in workers if each.silent_s + age_s <= within_s)

    def is_from_after(self, start_s: float, *, now_s: float) -> bool:
        return now_s - self.age_s >= start_s

    def _relative(self, ess_ratio: float | None) -> float | None:
        if ess_ratio is None or self.last is None:
            return None
        return min(1.0, ess_ratio / self.last.on_policy_ess_ratio)


_SIGNALS: Final = TypeAdapter(RunSignals)


def checked_signals(values: Mapping[str, Any]) -> RunSignals:
    """Return signals that came from outside, with values in their ranges."""
    try:
        return _SIGNALS.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}") from error
