"""The learner's report: signals for the control loop, and numbers for the status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vcpo.control import RunSignals
from vcpo.learner_control import optional_field, run_signals, set_aside_notice
from vcpo.records.no_update import all_skipped_notice, no_update_notice
from vcpo.wire.phase import RunPhase, phase_from_message
from vcpo.wire.v1 import control_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What the learner knows of one rollout worker."""

    in_flight: int
    """Trajectories that it generates now."""
    silent_s: float
    """Seconds since its last contact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReport:
    """One report of a learner."""

    signals: RunSignals
    phase: RunPhase = RunPhase.RUNNING
    ess_ratio: float | None = None
    """ESS ratio of the last step, in [0, 1]."""
    learning_rate_scale: float | None = None
    reward_mean: float | None = None
    """Mean reward of recent steps; from Prometheus, of the last step."""
    tokens_per_s: float | None = None
    """Response tokens accepted per second; unknown from Prometheus."""
    accuracy: float | None = None
    """Mean reward of the newest evaluation."""
    workers: Mapping[str, WorkerReport] = field(default_factory=dict)
    """Workers by id, which is the name of the pod."""
    failure: str = ""
    """Why the learner failed the run, in a sentence; empty unless it has."""
    failures_in_a_row: int = 0
    """Generations that failed since the last one that succeeded."""
    latest_generation_failure: str = ""
    """Error of the latest of these failures; empty without failures, and from Prometheus."""
    set_aside: str = ""
    """Which workers the learner has just set aside, in a sentence; empty if none, and from
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
    is_fresh: bool = True
    """Whether the report is returned for the first time. The operator sends commands only on fresh
    reports, so that it does not repeat a command at every reconcile while no new report arrives."""
    is_silent: bool = False
    """Whether the learner has not answered a later call."""

    def at_age(self, age_s: float) -> LearnerReport:
        """Return the report at an age of `age_s` seconds, no longer fresh."""
        return replace(self, signals=replace(self.signals, age_s=age_s), is_fresh=False)

    @property
    def has_work(self) -> bool:
        """Whether the learner trains, or drains and still waits for trajectories."""
        has_work_in_flight = self.phase is RunPhase.DRAINING and self.signals.in_flight > 0
        return self.phase is RunPhase.RUNNING or has_work_in_flight

    def has_contact(self, within_s: float) -> bool:
        """Whether the learner itself reported within the last `within_s` seconds."""
        return not self.is_silent and self.signals.age_s <= within_s

    def workers_in_contact(self, within_s: float) -> frozenset[str]:
        """Return the workers that were in contact with the learner within `within_s` seconds."""
        if not self.has_contact(within_s):
            return frozenset()
        workers, age_s = self.workers.items(), self.signals.age_s
        return frozenset(name for name, each in workers if each.silent_s + age_s <= within_s)

    def is_from_after(self, start_s: float, *, now_s: float) -> bool:
        """Whether the learner made the report at `start_s` or later; both are Unix times."""
        return now_s - self.signals.age_s >= start_s


def no_update_message(num_skipped: int, reason: str, *, has_never_updated: bool) -> str:
    """Return a sentence about skipped steps in a row; empty while they are too few."""
    if has_never_updated:
        return all_skipped_notice(num_skipped, reason)
    return no_update_notice(num_skipped, reason) or ""


def learner_report(message: control_pb2.Signals) -> LearnerReport:
    """Parse the learner's message.

    Raises: ValueError that names the field that is out of its range.
    """
    skipped, reason = message.skipped_steps_in_a_row, message.skip_reason
    has_never_updated = 0 < message.total_steps <= skipped
    return LearnerReport(
        signals=run_signals(message, age_s=0.0),
        phase=phase_from_message(message.phase),
        ess_ratio=optional_field(message, "ess_ratio"),
        learning_rate_scale=optional_field(message, "learning_rate_scale"),
        reward_mean=optional_field(message, "reward_mean"),
        tokens_per_s=message.generated_tokens_per_second,
        failure=message.failure,
        no_update=no_update_message(skipped, reason, has_never_updated=has_never_updated),
        has_never_updated=has_never_updated,
        collapse=message.collapse,
        set_aside=set_aside_notice(message),
        mismatch=message.mismatch,
        lost_changes=message.lost_changes,
        failures_in_a_row=message.failures_in_a_row,
        latest_generation_failure=message.failures[0].message if message.failures else "",
        accuracy=message.evaluations[-1].accuracy if message.evaluations else None,
        workers={
            worker.worker_id: WorkerReport(
                in_flight=worker.in_flight_trajectories, silent_s=worker.seconds_since_seen
            )
            for worker in message.workers
        },
    )
