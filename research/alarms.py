"""When the early warning comes, computed again from the records of cells.

The warning is the learner's own, `vcpo.algo.EarlyWarning`, so that other thresholds can be judged
without running a cell again.
"""

from __future__ import annotations

from research.cells.records import StepColumns
from vcpo.algo.health.early_warning import EarlyWarning, StepHealth, WarningLevel


def first_alarm(steps: StepColumns, level: WarningLevel) -> int | None:
    """Return the first step of a cell with a warning of this level or a worse one, or None."""
    warning = EarlyWarning()
    columns = steps.ess_ratio, steps.on_policy_ess_ratio, steps.ess, steps.gradient_norm
    for step, (ratio, on_policy, ess, norm) in enumerate(zip(*columns, strict=True), start=1):
        health = StepHealth(relative_ess=ratio / on_policy, ess=ess, gradient_norm=norm or None)
        warning = warning.observe(health)
        if warning.level.is_at_least(level):
            return step
    return None
