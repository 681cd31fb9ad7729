"""What the learner tells of its run: records, events, and now and then a log line."""

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from vcpo.algo.ess.calibration import STALE_STEPS
from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.limits import warning_reason
from vcpo.control.signals import WINDOW_STEPS
from vcpo.judgement import no_update_notice, skip_cause
from vcpo.records.journal import (
    EvaluationRecord,
    EventRecord,
    Journal,
    Metrics,
    read_metrics,
)
from vcpo.records.samples import Sample, write_answers, write_samples
from vcpo.records.step_record import StepRecord
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.troubles import is_told

_LOGGER = logging.getLogger(__name__)
LINE_PERIOD_S: Final = 30.0
"""Least time between the log lines of two steps; the first and the last step always get one."""
_LOGGED: Final = (
    *("step", "reward_mean", "relative_ess_ratio", "skipped", "lag_mean", "lag_max"),
    *("learning_rate", "learning_rate_schedule", "learning_rate_scale", "learning_rate_backoff"),
    "tokens_per_s",
)
"""Numbers of the record that are fields of its log line."""
_LOW_QUANTILE = 0.1
_NAMED_REWARDS = 4
"""Far rewards that an event names."""


class StepLog:
    """Remembers what it has reported, so that a lasting state is reported once.

    Owner: the learner's event loop.
    """

    def __init__(self, total_steps: int, *, clock: Clock) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._logged_s: float | None = None
        """Time of the last line; None before the first."""
        self._warning_level: str = WarningLevel.OK
        self._rate_factor = 1.0
        self._rollbacks = 0
        self._is_calibration_stale = False

    def resume(self, warning_level: WarningLevel, *, rate_factor: float, rollbacks: int) -> None:
        """Take the health of a checkpoint as reported: it is no news of the next step.

        rate_factor: factor on the learning rate that warnings and rollbacks have left.
        rollbacks: of the run so far.
        """
        self._warning_level = warning_level
        self._rate_factor = rate_factor
        self._rollbacks = rollbacks

    def events(
        self, record: StepRecord, skip_detail: str | None, *, next_backoff: float
    ) -> Iterator[tuple[str, str]]:
        """Yield kind and message of each event of a step.

        next_backoff: factor on the learning rate that this step leaves to the next one.
        skip_detail: the number because of which the step was skipped, if there is one.
        """
        if record.skipped is not None:
            number = record.skipped_steps
            if notice := is_told(number) and no_update_notice(number, record.skipped):
                yield "NoUpdate", notice
            elif is_told(number):
                detail = f" ({skip_detail})" if skip_detail else ""
                yield "StepSkipped", f"step {record.step}: {skip_cause(record.skipped)}{detail}"
        if record.warning_level != self._warning_level:
            self._warning_level = record.warning_level
            text = f"step {record.step}: {record.warning_level} (score {record.warning_score:.2f})"
            yield "CollapseWarning", text
        if next_backoff < self._rate_factor:
            reason = f"rollback at step {record.step}"
            if record.rollbacks == self._rollbacks:
                level = WarningLevel(record.warning_level)
                reason = warning_reason(level, record.warning_score, record.step)
            change = f"x {self._rate_factor:g} -> x {next_backoff:g}"
            yield "LearningRateLowered", f"Learning rate {change}: {reason}."
        self._rate_factor = next_backoff
        self._rollbacks = record.rollbacks
        is_stale = record.calibration_age_steps >= STALE_STEPS
        if is_stale != self._is_calibration_stale and not self._has_all_responses(record):
            self._is_calibration_stale = is_stale
            yield _calibration_event(record, is_stale=is_stale)

    def _has_all_responses(self, record: StepRecord) -> bool:
        batch = record.consumed // record.step
        return record.consumed + record.buffered >= self._total_steps * batch

    def log_if_due(self, record: StepRecord) -> None:
        """Log a step in one line; of a fast run most steps get none."""
        now_s = self._clock()
        is_last = record.step == self._total_steps
        if self._logged_s is None or is_last or now_s - self._logged_s >= LINE_PERIOD_S:
            self._logged_s = now_s
            line = f"step {record.step}/{self._total_steps}: {_step_in_words(record)}"
            _LOGGER.info("%s", line, extra={name: getattr(record, name) for name in _LOGGED})


def far_rewards(
    step: int, groups: Sequence[Lease], limits: tuple[float, float] | None
) -> str | None:
    """Return what to tell of rewards that are far from the others; None if none is.

    limits: smallest and largest reward that are not far; None if unknown.
    """
    low, high = limits or (-math.inf, math.inf)
    rewards = [
        (one.reward, one.worker_id or group.worker_id, group.prompt_index)
        for group in groups
        for one in group.trajectories
    ]
    far = [each for each in rewards if not low <= each[0] <= high]
    if not far:
        return None
    named = [f"{one:g} from worker {by} for prompt {prompt}" for one, by, prompt in far]
    more = f" and {len(far) - _NAMED_REWARDS} more" if len(far) > _NAMED_REWARDS else ""
    ((worker, number),) = Counter(by for _, by, _ in far).most_common(1)
    return (
        f"step {step}: {', '.join(named[:_NAMED_REWARDS])}{more}, far from the rewards before"
        f" (limits {low:g} and {high:g}). They are {len(far) / len(rewards):.1%} of the step's, and"
        f" {number} are of {worker}. Those of less than half of the workers make no collapse, but"
        " they are trained on: look at the environment, or refuse them by"
        " environment.maxAbsoluteReward"
    )


def _step_in_words(record: StepRecord) -> str:
    relative_ess_ratio = record.relative_ess_ratio or 0.0
    skipped = f", no update ({record.skipped})" if record.skipped is not None else ""
    return (
        f"reward {record.reward_mean:.3f}, ESS {relative_ess_ratio:.2f} of on-policy,"
        f" lr {record.effective_rate or 0}, lag {record.lag_mean:.1f} (max {record.lag_max}),"
        f" {record.tokens_per_s:.0f} tokens/s,"
        f" {record.step_s:.1f} s after waiting {record.idle_s:.1f} s{skipped}"
    )


def _calibration_event(record: StepRecord, *, is_stale: bool) -> tuple[str, str]:
    """Return kind and message for an on-policy ratio that became old, or that is measured again."""
    if not is_stale:
        return "CalibrationRenewed", f"step {record.step}: fresh tokens arrive again"
    return "CalibrationStale", (
        f"step {record.step}: no token of the learner's own version has arrived for"
        f" {record.calibration_age_steps} steps. The on-policy ESS ratio stays at"
        f" {record.on_policy_ess_ratio:.2f} and becomes uncertain, because responses take longer"
        " than a step. Fix: lower sampling.maxNewTokens, add workers, or set"
        " algorithm.onPolicyEssRatio"
    )


def streak_fields(
    before: StepRecord | None,
    *,
    level: WarningLevel,
    has_collapsed: bool,
    skipped: str | None,
    lag_limit_steps: int,
    max_policy_lag_steps: int,
) -> dict[str, Any]:
    """Return the fields of a step's record that count steps in a row, this one included.

    before: the step before; None begins all counts anew.
    level, has_collapsed: early warning and reward after the step.
    skipped: why it made no update; None if it did.
    lag_limit_steps: the limit under which its batch was taken, of a bound of
        `max_policy_lag_steps`. A limit that rises is a recovery.
    """
    is_critical = level in (WarningLevel.CRITICAL, WarningLevel.DEAD)
    rises = before is not None and lag_limit_steps > before.lag_limit_steps
    is_throttled = lag_limit_steps < max_policy_lag_steps and not rises
    return {
        "critical_steps": is_critical * (1 + (before.critical_steps if before else 0)),
        "collapsed_steps": has_collapsed * (1 + (before.collapsed_steps if before else 0)),
        "throttled_steps": is_throttled * (1 + (before.throttled_steps if before else 0)),
        "skipped_steps": (skipped is not None) * (1 + (before.skipped_steps if before else 0)),
    }


def window_fields(
    last: Collection[StepRecord], *, ess_ratio: float, step_s: float, idle_s: float
) -> dict[str, Any]:
    """Return the fields of a step's record that are means over the last steps and this one.

    last: the steps before, at most `WINDOW_STEPS`. ess_ratio: 0 if a weight has no value.
    """
    known = [*(one.ess_ratio for one in last), ess_ratio][-WINDOW_STEPS:]
    ratios = [ratio for ratio in known if ratio]
    return {
        "ess_ratio_mean": sum(ratios) / len(ratios) if ratios else None,
        "ess_ratio_low": sorted(ratios)[int(_LOW_QUANTILE * (len(ratios) - 1))] if ratios else None,
        "step_interval_s": (sum(each.step_s + each.idle_s for each in last) + step_s + idle_s)
        / (1 + len(last)),
    }


class RunRecords:
    """Writes and reads the records of one run. Owner: the learner's event loop."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._journal = Journal(run_dir)

    def event(self, kind: str, message: str) -> None:
        record = EventRecord(time_unix_s=time.time(), source="learner", kind=kind, message=message)
        _LOGGER.log(record.level, "%s: %s", kind, message, extra={"event": kind})
        self._journal.event(record)

    def step(self, record: StepRecord) -> None:
        self._journal.step(record)

    def samples(self, step: int, samples: Sequence[Sample], *, total_steps: int) -> None:
        with contextlib.suppress(OSError):
            write_samples(self._run_dir, step, samples, total_steps=total_steps)

    def evaluation(self, record: EvaluationRecord, answers: Sequence[Sample]) -> None:
        with contextlib.suppress(OSError):
            write_answers(self._run_dir, record.step, answers)
        self._journal.evaluation(record)

    def read(self) -> Metrics:
        return read_metrics(self._run_dir)
