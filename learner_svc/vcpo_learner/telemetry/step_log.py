"""What is told of a step besides its record: events for people, a line in the log now and then."""

from __future__ import annotations

from collections.abc import Iterator

from vcpo.algo import STALE_STEPS, WarningLevel
from vcpo.records.no_update import no_update_notice, skip_cause
from vcpo.records.step_record import StepRecord

_LOG_LINES = 100
"""About how many steps of a run get a line in the log."""
_SKIPS_TOLD = 3
"""Skipped steps in a row that get an event each; of more, the tenth, hundredth and so on do."""


class StepNews:
    """Remembers what was told, so that what lasts is not told at every step."""

    def __init__(self, total_steps: int) -> None:
        self._skipped_in_a_row = 0
        self._total_steps = total_steps
        self._log_every_steps = max(1, total_steps // _LOG_LINES)
        self._warning_level: str = WarningLevel.OK
        self._is_calibration_stale = False
        self._is_first = True

    def events(self, record: StepRecord, skip_detail: str | None) -> Iterator[tuple[str, str]]:
        """Kinds and messages of the events of a step.

        skip_detail: The number for which it was skipped, if there is one.
        """
        self._skipped_in_a_row = 0 if record.skipped is None else self._skipped_in_a_row + 1
        if record.skipped is not None:
            number = self._skipped_in_a_row
            if number <= _SKIPS_TOLD:
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
        if is_stale != self._is_calibration_stale and not self._is_all_sampled(record):
            self._is_calibration_stale = is_stale
            yield _calibration_event(record, is_stale=is_stale)

    def _is_all_sampled(self, record: StepRecord) -> bool:
        """Whether the answers for all steps have arrived: what is fresh then stops by itself."""
        batch = record.consumed // record.step
        return record.consumed + record.buffered >= self._total_steps * batch

    def log_line(self, record: StepRecord) -> str | None:
        """A step in one line; None for most steps of a long run."""
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
    """Kind and message for an on-policy ratio that has got old, or is measured again."""
    if not is_stale:
        return "CalibrationRenewed", f"step {record.step}: fresh tokens have arrived again"
    return "CalibrationStale", (
        f"step {record.step}: no token of the learner's own version has arrived for"
        f" {record.calibration_age_steps} steps; the on-policy ESS ratio stays at"
        f" {record.on_policy_ess_ratio:.2f} and grows uncertain. Answers take longer than a step:"
        " lower sampling.maxNewTokens, add workers, or give algorithm.onPolicyEssRatio"
    )
