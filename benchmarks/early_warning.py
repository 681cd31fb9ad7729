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
    other_task_missed            of its collapses without a warning before: the number, how many are
                                 critical within an interval after it (`late`) or recover to 0.8
    recall_by_lag                of all methods, both tasks; at lag 0 the ESS shows nothing
    false_critical_share_default share of the default method's cells without a collapse, of all
                                 seeds and tasks, that are critical; nothing was tuned on them
    default_collapses            its collapses as [lag, number, warned]
    evaluation_alert             of all cells, of those that collapse, the others and the default's:
                                 the number, and of cells with two low evaluations in a row
"""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any, Final

import pandas as pd

from research.cells.records import CellRecord, table_records
from research.measures import collapse_step, first_alarm
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


def judged(record: CellRecord) -> dict[str, Any]:
    """Return a recorded cell and what the warning says of it."""
    collapse = collapse_step(record.evaluations)
    alarm = first_alarm(record.steps, WarningLevel.CRITICAL)
    accuracies = [each.accuracy for each in record.evaluations]
    errors = [share_error(each, _EVALUATION_PROMPTS) for each in accuracies]
    ends = range(1, 1 + len(accuracies))
    return {
        "method": record.method,
        "lag": record.lag,
        "seed": record.seed,
        "fell": collapse is not None,
        "lead": math.nan if alarm is None or collapse is None else collapse - alarm,
        "warned": alarm is not None and (collapse is None or alarm < collapse),
        "recovered": accuracies[-1] > RECOVERED_SHARE * max(accuracies),
        "low": any(
            num_low_at_end(accuracies[:end], errors=errors[:end]) >= _LOW_EVALUATIONS
            for end in ends
        ),
    }


def quality(cells: pd.DataFrame) -> dict[str, Any]:
    """Return precision, recall and lead of the warning; None where nothing counts."""
    leads = cells.lead[cells.fell & cells.warned]
    right, warned, fallen = len(leads), int(cells.warned.sum()), int(cells.fell.sum())
    return {
        "precision": round(right / warned, 3) if warned else None,
        "recall": round(right / fallen, 3) if fallen else None,
        "lead_steps_median": median(map(int, leads)) if right else None,
        "cells": len(cells),
        "collapses": fallen,
    }


def missed(plain: pd.DataFrame) -> dict[str, int]:
    """Return what became of the collapses that came without a warning; see the module."""
    unseen = plain[plain.fell & ~plain.warned]
    is_late = unseen.lead >= -_EVALUATION_STEPS
    recovered = unseen.recovered[~is_late]
    return {"collapses": len(unseen), "late": int(is_late.sum()), "recovered": int(recovered.sum())}


def by_method(plain: pd.DataFrame) -> dict[str, Any]:
    """Return the quality for each method, and for all of them."""
    return {**{str(at): quality(own) for at, own in plain.groupby("method")}, "all": quality(plain)}


def measure(tuned: pd.DataFrame, other: pd.DataFrame) -> dict[str, Any]:
    """Return the figures; see the module."""
    cells = pd.concat([tuned, other])
    odd, new = (each[each.method != DEFAULT] for each in (tuned[tuned.seed % 2 == 1], other))
    default = cells[cells.method == DEFAULT]
    held, fallen = default[~default.fell], default[default.fell]
    kinds = {"collapses": cells[cells.fell], "others": cells[~cells.fell], "default": held}
    by_lag = pd.concat([odd, new]).groupby("lag")
    return {
        "by_method": by_method(odd),
        "other_task": by_method(new),
        "other_task_missed": missed(new),
        "recall_by_lag": {int(lag): quality(own)["recall"] for lag, own in by_lag},
        "false_critical_share_default": round(held.warned.mean(), 4),
        "default_cells": len(held),
        "default_collapses": [
            [int(lag), len(own), int(own.warned.sum())] for lag, own in fallen.groupby("lag")
        ],
        "evaluation_alert": {at: [len(own), int(own.low.sum())] for at, own in kinds.items()},
    }


def judged_cells(*tasks: str) -> pd.DataFrame:
    """Judge all recorded cells of tasks."""
    tables = (RESULTS / task / "cells.jsonl.bz2" for task in tasks)
    return pd.DataFrame([judged(each) for table in tables for each in table_records(table)])


def main() -> None:
    """Print the figures."""
    print(json.dumps(measure(judged_cells(*TUNED_TASKS), judged_cells(OTHER_TASK))))


if __name__ == "__main__":
    main()
