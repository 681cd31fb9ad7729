"""How far the early warning may be trusted, from the records of all studies.

    python -m benchmarks.early_warning

The learner's own code (`vcpo.algo.EarlyWarning`) is run over the recorded steps of every cell. Its
thresholds were chosen on the even seeds of the tasks in `TUNED_TASKS`; everything printed is of the
odd seeds, and of the task `tool`, of which nothing was used. A cell counts as warned if it is
critical before the evaluation that shows its collapse, or at any step if it does not collapse. The
last line is JSON:

    by_method                    per method without a trust region, and for all of them together as
                                 `all`: `precision`, `recall`, `lead_steps_median` (over the warned
                                 collapses), and the numbers of `cells` and `collapses`
    other_task                   the same for the task that nothing was tuned on
    other_task_missed            of its collapses without a warning before, as above: the number,
                                 how many are critical within an evaluation's interval after the
                                 one that shows the collapse (`late`), and how many of the rest end
                                 with 0.8 of their best (`recovered`)
    recall_by_lag                of all methods, both tasks; at lag 0 the ESS shows nothing
    false_critical_share_default share of the default method's cells without a collapse, of all
                                 seeds and tasks, that are critical; nothing was tuned on them
    default_collapses            its collapses as [lag, number, warned]
    evaluation_alert             of all cells, of those that collapse and of the others: the number,
                                 and that of cells with two low evaluations in a row, which alert;
                                 `default` are those of the default method that do not collapse
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from research.alarms import first_alarm
from research.cells.records import CellRecord, table_records
from research.measures import collapse_step
from vcpo.algo.health.collapse import RECOVERED_SHARE, num_low_at_end, share_error
from vcpo.algo.health.early_warning import WarningLevel

RESULTS: Final = Path(__file__).parents[1] / "research" / "records"
TUNED_TASKS: Final = ("countdown", "countdown-k128", "sort-long")
OTHER_TASK: Final = "tool"
DEFAULT: Final = "vcpo2"
_EVALUATION_PROMPTS: Final = 256
"""Of all four studies."""
_EVALUATION_STEPS: Final = 16
"""Steps from one evaluation to the next in `OTHER_TASK`."""
_LOW_EVALUATIONS: Final = 2
"""As `VCPOEvaluationFalling` asks for."""


class Judged:
    """A recorded cell and what the warning says of it."""

    def __init__(self, record: CellRecord) -> None:
        self.method = record.method
        self.lag = record.lag
        self.seed = record.seed
        self.collapse = collapse_step(record.evaluations)
        self.alarm = first_alarm(record.steps, WarningLevel.CRITICAL)
        accuracies = [each.accuracy for each in record.evaluations]
        self.is_recovered = accuracies[-1] > RECOVERED_SHARE * max(accuracies)
        self.is_evaluated_low = _is_evaluated_low(accuracies)

    @property
    def is_warned(self) -> bool:
        return self.alarm is not None and (self.collapse is None or self.alarm < self.collapse)

    @property
    def lead_steps(self) -> int:
        return 0 if self.alarm is None or self.collapse is None else self.collapse - self.alarm


def _is_evaluated_low(accuracies: Sequence[float]) -> bool:
    """Return whether two evaluations in a row are low at any time."""
    errors = [share_error(each, _EVALUATION_PROMPTS) for each in accuracies]
    return any(
        num_low_at_end(accuracies[:end], errors=errors[:end]) >= _LOW_EVALUATIONS
        for end in range(1, 1 + len(accuracies))
    )


def evaluation_alert(cells: Sequence[Judged]) -> dict[str, list[int]]:
    """Return numbers of cells and of those that alert by their evaluations."""
    others = [each for each in cells if each.collapse is None]
    kinds = {
        "collapses": [each for each in cells if each.collapse is not None],
        "others": others,
        "default": [each for each in others if each.method == DEFAULT],
    }
    return {
        name: [len(those), sum(each.is_evaluated_low for each in those)]
        for name, those in kinds.items()
    }


def quality(cells: Sequence[Judged]) -> dict[str, Any]:
    """Return precision, recall and lead of the warning; None where nothing counts."""
    collapsed = [each for each in cells if each.collapse is not None]
    warned = [each for each in cells if each.is_warned]
    leads = [each.lead_steps for each in collapsed if each.is_warned]
    right = len(leads)
    return {
        "precision": round(right / len(warned), 3) if warned else None,
        "recall": round(right / len(collapsed), 3) if collapsed else None,
        "lead_steps_median": median(leads) if leads else None,
        "cells": len(cells),
        "collapses": len(collapsed),
    }


def missed(cells: Sequence[Judged]) -> dict[str, int]:
    """Return what became of the collapses that came without a warning; see the module."""
    plain = [each for each in cells if each.method != DEFAULT]
    unseen = [each for each in plain if each.collapse is not None and not each.is_warned]
    rest = [each for each in unseen if each.alarm is None or -each.lead_steps > _EVALUATION_STEPS]
    return {
        "collapses": len(unseen),
        "late": len(unseen) - len(rest),
        "recovered": sum(each.is_recovered for each in rest),
    }


def by_method(cells: Sequence[Judged]) -> dict[str, Any]:
    """Return the quality for each method without a trust region, and for all of them."""
    plain = [each for each in cells if each.method != DEFAULT]
    methods = sorted({each.method for each in plain})
    each_one = {name: quality([one for one in plain if one.method == name]) for name in methods}
    return {**each_one, "all": quality(plain)}


def measure(tuned: Iterable[Judged], other: Iterable[Judged]) -> dict[str, Any]:
    """Return the figures; see the module."""
    tuned, other = list(tuned), list(other)
    odd = [each for each in tuned if each.seed % 2]
    plain = [each for each in (*odd, *other) if each.method != DEFAULT]
    default = [each for each in (*tuned, *other) if each.method == DEFAULT]
    held = [each for each in default if each.collapse is None]
    fallen = [each for each in default if each.collapse is not None]
    lags = sorted({each.lag for each in plain})
    return {
        "by_method": by_method(odd),
        "other_task": by_method(other),
        "other_task_missed": missed(other),
        "recall_by_lag": {
            lag: quality([each for each in plain if each.lag == lag])["recall"] for lag in lags
        },
        "false_critical_share_default": round(fmean(each.is_warned for each in held), 4),
        "default_cells": len(held),
        "default_collapses": [
            [lag, len(those), sum(each.is_warned for each in those)]
            for lag in sorted({each.lag for each in fallen})
            for those in [[each for each in fallen if each.lag == lag]]
        ],
        "evaluation_alert": evaluation_alert([*tuned, *other]),
    }


def judged_cells(task: str) -> list[Judged]:
    """Judge all recorded cells of a task."""
    return [Judged(each) for each in table_records(RESULTS / task / "cells.jsonl.bz2")]


def main() -> None:
    """Print the figures."""
    tuned = [cell for task in TUNED_TASKS for cell in judged_cells(task)]
    print(json.dumps(measure(tuned, judged_cells(OTHER_TASK))))


if __name__ == "__main__":
    main()
