"""What people read about a step besides its record: events, and now and then a line in the log."""

from __future__ import annotations

from collections.abc import Iterator

from vcpo.algo import STALE_STEPS, WarningLevel
from vcpo.records.no_update import no_update_notice, skip_cause
from vcpo.records.step_record import StepRecord

_LOG_LINES = 100
"""About how many steps of a run get a line in the log."""
_SKIP_EVENTS = 3
"""Skipped steps in a row that get an event each; after them the tenth, hundredth and so on do."""


class StepLog:
    """Remembers what it has reported, so that a lasting state is reported once.

    Owner: the learner's event loop.
    """

    def __init__(self, total_steps: int) -> None:
        self._skipped_in_a_row = 0
        self._total_steps = total_steps
        self._log_every_steps = max(1, total_steps // _LOG_LINES)
        self._warning_level: str = WarningLevel.OK
        self._is_calibration_stale = False
        self._is_first = True

    def events(self, record: StepRecord, skip_detail: str | None) -> Iterator[tuple[str, str]]:
        """Yield kind and message of each event of a step.

        skip_detail: the number because of which the step was skipped, if there is one.
        """
        self._skipped_in_a_row = 0 if record.skipped is None else self._skipped_in_a_row + 1
        if record.skipped is not None:
            number = self._skipped_in_a_row
            if number <= _SKIP_EVENTS:
                detail = f" ({skip_detail})" if skip_detail else ""
                yield "StepSkipped", f"step {record.step}: {skip_cause(record.skipped)}{detail}"
            notice = no_update_notice(number, record.skipped)
            if notice is not None and number == 10 ** (len(str(number)) - 1):
                yield "NoUpdate", notice
        if record.warning_level != self._warning_level:
            self._warning_level = record.warning_level
            text = f"step {record.step}: {record.warning_level} (score {record.warning_score:.2f})"
            yield "CollapseWarning", text
        is_stale = record.calibration_age_steps >= STALE_STEPS
        if is_stale != self._is_calibration_stale and not self._has_all_responses(record):
            self._is_calibration_stale = is_stale
            yield _calibration_event(record, is_stale=is_stale)

    def _has_all_responses(self, record: StepRecord) -> bool:
        """Return whether the responses for all steps have arrived; nothing fresh comes then."""
        batch = record.consumed // record.step
        return record.consumed + record.buffered >= self._total_steps * batch

    def log_line(self, record: StepRecord) -> str | None:
        """Return a step in one line; None for most steps of a long run."""
        is_due = record.step % self._log_every_steps == 0 or record.step == self._total_steps
        if not is_due and not self._is_first:
            return None
        self._is_first = False
        skipped = f", no update ({record.skipped})" if record.skipped is not None else ""
        return (
            f"step {record.step}/{self._total_steps}: reward {record.reward_mean:.3f}, "
            f"ESS {record.ess_ratio:.2f} of {record.on_policy_ess_ratio:.2f}, "
            f"lr x{record.learning_rate_scale:.2f}, "
            f"lag {record.lag_mean:.1f} (max {record.lag_max}), "
            f"{record.step_s:.1f} s after waiting {record.idle_s:.1f} s{skipped}"
        )


def _calibration_event(record: StepRecord, *, is_stale: bool) -> tuple[str, str]:
    """Return kind and message for an on-policy ratio that became old, or that is measured again."""
    if not is_stale:
        return "CalibrationRenewed", f"step {record.step}: fresh tokens arrive again"
    return "CalibrationStale", (
        f"step {record.step}: no token of the learner's own version has arrived for"
        f" {record.calibration_age_steps} steps. The on-policy ESS ratio stays at"
        f" {record.on_policy_ess_ratio:.2f} and becomes uncertain, because responses take longer"
        " than a step. Cure: lower sampling.maxNewTokens, add workers, or set"
        " algorithm.onPolicyEssRatio"
    )
