"""One run among several: a row of `vcpo top`, on the terminal and in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Final, Literal

from rich.table import Table
from rich.text import Text

from vcpo.local.terminal.panel import WARNING_STYLES, ess_style, rate_style
from vcpo.local.terminal.run_view import OLD_S, RunView, printable
from vcpo.report.numbers import UNKNOWN, decimal, duration, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One column of the table."""

    name: str
    width: int
    """Characters that its usual values need."""
    side: Literal["left", "right"] = "right"
    drop_order: int = 0
    """Columns of a narrow terminal go by this number, the smallest first; 0 always stays."""


_COLUMNS: Final = (
    _Column(name="run", width=14, side="left"),
    _Column(name="status", width=9, side="left"),
    _Column(name="step", width=9),
    _Column(name="reward", width=6, drop_order=5),
    _Column(name="acc", width=5, drop_order=3),
    _Column(name="ESS", width=4),
    _Column(name="warning", width=8, side="left"),
    _Column(name="lr", width=8, drop_order=4),
    _Column(name="lag/lim/max", width=11),
    _Column(name="workers", width=7, drop_order=2),
    _Column(name="tok/s", width=7, drop_order=1),
    _Column(name="age", width=7),
)
_GAP = 2
_DAY_S = 86_400
_STATUS_STYLES: Final = {
    **dict.fromkeys(("running", "complete"), "green"),
    **dict.fromkeys(("failed", "collapsed", "silent"), "bold red"),
}
"""Style of a status; yellow for every other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run, where it is, and its state."""

    place: str
    """Its directory."""
    view: RunView

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values; a number that is not known is None."""
        view, signals = self.view, self.view.signals
        rate = signals.effective_rate
        return {
            "place": self.place,
            "run": view.run.metadata.name,
            "status": view.phase,
            "verdict": asdict(view.verdict),
            "step": signals.step,
            "steps": view.total_steps,
            "reward": signals.reward_mean,
            "accuracy": signals.accuracy,
            "ess_ratio": signals.ess_ratio,
            "relative_ess_ratio": signals.relative_ess_ratio,
            "warning": {"level": signals.warning_level, "score": signals.warning_score},
            "learning_rate": None if rate is None else asdict(rate),
            "lag": {"p50": signals.lag_p50, "max": signals.lag_max},
            "lag_limit_steps": signals.lag_limit_steps,
            "max_policy_lag_steps": view.max_policy_lag_steps,
            "workers": {"ready": view.workers_ready, "desired": view.workers_desired},
            "tokens_per_s": signals.tokens_per_s,
            "age_s": signals.step_age_s,
        }


def runs_table(rows: Sequence[RunRow], *, width: int, chosen: int | None = None) -> Table:
    """Return the table of runs, without the columns that do not fit.

    width: characters of a line.
    chosen: index of the row that is drawn in reverse; None draws none so.
    """
    columns = _fitting(width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        is_run = column.name == "run"
        table.add_column(
            column.name,
            justify=column.side,
            no_wrap=True,
            min_width=column.width,
            max_width=None if is_run else max(column.width, len(column.name)),
        )
    parents = {row.place.rpartition("/")[0] for row in rows}
    # The folder that all have in common is not repeated in every row.
    parent = f"{parents.pop()}/" if len(parents) == 1 and "" not in parents else ""
    for index, row in enumerate(rows):
        cells = _cells(row, row.place.removeprefix(parent))
        shown = [cells[column.name] for column in columns]
        table.add_row(*shown, style="reverse" if index == chosen else "")
    return table


def _fitting(width: int) -> list[_Column]:
    columns = list(_COLUMNS)
    droppable = [each for each in columns if each.drop_order]
    droppable.sort(key=attrgetter("drop_order"), reverse=True)
    while droppable and sum(each.width + _GAP for each in columns) > width:
        columns.remove(droppable.pop())
    return columns


def _cells(row: RunRow, label: str) -> dict[str, Text]:
    """Return the cells of a row by the name of their column."""
    view, signals = row.view, row.view.signals
    relative, level = signals.relative_ess_ratio, signals.warning_level
    lag = f"{whole(signals.lag_p50)}/{signals.lag_limit_steps}/{view.max_policy_lag_steps}"
    is_short = view.workers_ready < view.workers_desired
    is_silent = signals.age_s >= OLD_S
    throttled = "yellow" if view.is_throttled else ""
    age_s = signals.step_age_s or 0.0
    age = f"{age_s / _DAY_S:.0f}d" if age_s >= _DAY_S else duration(signals.step_age_s)
    return {
        "run": Text(printable(label), "bold"),
        "status": Text(printable(view.phase), _STATUS_STYLES.get(view.phase, "yellow")),
        "step": Text(f"{signals.step}/{view.total_steps}"),
        "reward": Text(decimal(signals.reward_mean, ".3f")),
        "acc": Text(decimal(signals.accuracy, ".3f")),
        "ESS": Text(UNKNOWN if relative is None else f"{relative:.0%}", ess_style(view)),
        "warning": Text(level or UNKNOWN, WARNING_STYLES.get(level or "", "")),
        "lr": Text(decimal(signals.learning_rate, ".3g"), rate_style(view)),
        "lag/lim/max": Text(lag, "bold red" if view.is_lag_broken else throttled),
        "workers": Text(
            f"{view.workers_ready}/{view.workers_desired}", "yellow" if is_short else ""
        ),
        "tok/s": Text(decimal(signals.tokens_per_s, ",.0f")),
        "age": Text(age, "bold red" if is_silent else ""),
    }
